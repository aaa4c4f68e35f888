"""The figures of a validation as a table on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("trials", "n", "MAPE", "rho", "pairs", "regret", "inside", "memory", "seen", "false")

LEGEND = (
    "rho: Spearman, mean over groups",
    "pairs: share in order of those more than 5 % apart",
    "regret: how much slower than the best trial the predicted best is, mean over groups",
    "inside: share within the stated interval of 90 %",
    "memory: MAPE of peaks; seen: of runs out of memory; false: of other runs said to be",
    "naive line: 45 % of the peak, recomputation included, 1F1B's bubble; 16 B a parameter",
)


def print_validation(document: dict[str, Any], console: Console, *, show_groups: bool) -> None:
    """Print one line a source with the naive line under it, and all together."""
    table = Table(
        title="Predicted beside measured", caption=_caption(document), caption_justify="left", padding=(0, 0, 0, 1)
    )
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for source, figures in document["sources"].items():
        _add(table, source, figures)
        if show_groups:
            for group, of_group in document["groups"][source].items():
                table.add_row(*_row(f"  {group}", of_group), style="dim")
    if len(document["sources"]) > 1:
        table.add_section()
        _add(table, "all", document["overall"])
    console.print(table)


def _add(table: Table, name: str, figures: dict[str, Any]) -> None:
    table.add_row(*_row(name, figures))
    table.add_row(*_row("  naive line", {**figures["naive"], "interval_coverage": None}), style="dim")


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    memory = figures["memory"]
    ranked = figures["spearman"]
    return [
        name,
        str(figures["n"]),
        _percent(figures["mape"]),
        "-" if ranked is None else f"{ranked:.3f}",
        _percent(figures["pair_accuracy"]),
        _percent(figures["top1_regret"]),
        _percent(figures["interval_coverage"]),
        _percent(memory["mape"]),
        _percent(memory["out_of_memory_recall"]),
        _percent(memory["false_alarms"]),
    ]


def _caption(document: dict[str, Any]) -> str:
    lines = list(LEGEND)
    if document["folds"]:
        lines.append(f"Calibrated in {document['folds']} folds: each group is predicted from groups of other folds.")
    elif document["calibrated_on"]:
        lines.append(f"Calibrated on {', '.join(document['calibrated_on'])}.")
    else:
        lines.append("Nothing was calibrated.")
    if document["in_sample"]:
        lines.append(f"IN-SAMPLE: {document['in_sample']} of the trials are among those of the calibration.")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
