"""The page of the benchmark, its picture, and a table of all engines, written from the JSON of a measurement.

python -m benchmarks.engines.page runs/engines.json
"""

import csv
import os
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median

from benchmarks.engines.results import (
    DEEPSPEED,
    IN_ONE_THREAD,
    IN_TWO_THREADS,
    OURS,
    OURS_AUTO,
    PIPELINE_ENGINE,
    PLAIN,
    TORCH,
    Document,
    Measured,
    Name,
    Run,
    is_ours,
    is_rival,
)
from benchmarks.measuring.command import Parser
from benchmarks.measuring.report import Section, written_between
from deepspeed_ext.plan.draw.elements import INK, MARGIN, MIDDLE, SOFT, document, rect, text

MEGABYTE = 2**20


def findings(run: Run) -> list[str]:
    """Return the findings of a table, one or two sentences each."""
    ours, rivals = ([each for each in run.timed if chosen(each)] for chosen in (is_ours, is_rival))
    if not (ours and rivals):
        return []
    by_time, by_memory = attrgetter("median_s"), attrgetter("fullest_bytes")
    first, second = sorted((min(ours, key=by_time), min(rivals, key=by_time)), key=by_time)
    others = "rivals" if is_ours(first) else "engines of ours"
    told_apart = "" if max(first.seconds) < min(second.seconds) else "; the ranges of their rounds overlap"
    found = [
        f"Fastest pipeline: *{first.name}*, {first.median_s:.3f} s. The fastest of the {others} is *{second.name}*, "
        f"{second.median_s:.3f} s: {second.median_s / first.median_s - 1:.1%} slower{told_apart}."
    ]
    if whole := [each for each in ours if each.engine == OURS]:
        best = min(whole, key=by_time)
        faster = [f"*{each.name}*" for each in rivals if each.median_s < best.median_s]
        found.append(
            f"Without token slices our fastest is *{best.schedule}*, {best.median_s:.3f} s. Faster than that: "
            f"{'; '.join(faster) or 'none of the rivals'}."
        )
    least = (min(each, key=by_memory) for each in (ours, rivals))
    mine, theirs = (f"{each.fullest_bytes / MEGABYTE:.0f} MB (*{each.name}*)" for each in least)
    found.append(f"Least memory on the fuller rank: ours {mine}, rivals {theirs}.")
    found += [
        f"Plain torch in one process with two threads takes {each.median_s:.3f} s, "
        f"{each.median_s / first.median_s - 1:+.1%} compared with the fastest pipeline."
        for each in run.timed
        if each.name == IN_TWO_THREADS
    ]
    return found


def circumstances(document: Document) -> list[str]:
    """Return machine, software, and how quiet the machine was, a sentence or two each."""
    software = ", ".join(f"{name} {version}" for name, version in document.software.items())
    sizes = ", ".join(f"{name} {value}" for name, value in document.model.items())
    rounds = ", ".join(f"{run.num_rounds} with {micro_batches(run.num_micro_batches)}" for run in document.runs)
    noise = document.noise
    products = [seconds / median(noise.product_s) - 1 for seconds in noise.product_s]
    spreads = [max(each.cpu_seconds) / min(each.cpu_seconds) - 1 for run in document.runs for each in run.timed]
    return [
        f"Measured on {document.date} in {document.wall_s / 60:.0f} minutes by `{document.command}`.",
        f"{document.machine}; {software}; gloo, fp32, SGD, one thread and one core a rank.",
        f"GPT ({sizes}) on {document.num_ranks} ranks. Rounds: {rounds}.",
        f"Noise: load {noise.load_at_start:.2f} at the start. Other processes took {noise.others_share:.1%} of the "
        f"cores' time, the host of the machine {noise.steal_share:.1%}. One matrix product, repeated before each "
        f"round, took {min(products):+.1%} to {max(products):+.1%} of its median.",
        "The same step of the same engine took the processors, waiting left out, up to "
        f"{max(spreads, default=0.0):.0%} longer in one round than in another; {median(spreads or [0.0]):.0%} for the "
        "median engine. Rows that differ by less may change places in another run.",
    ]


def micro_batches(count: int) -> str:
    """Return a number of micro-batches in words."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


COLUMNS = (
    "engine",
    "schedule",
    "median s",
    "least to most",
    "over one thread",
    "over PipelineEngine",
    "idle",
    "peak MB",
    "gradients",
)


def rows(document: Document, run: Run) -> Iterator[tuple[str, ...]]:
    """Yield the cells of every engine under `COLUMNS`, or the reason why it was not timed."""
    fastest = min((each for each in run.timed if each.engine != PLAIN), key=attrgetter("median_s"), default=None)
    for each in run.engines:
        if each.seconds:
            yield *each.name, *_cells(each, run, document.num_ranks, bold=each is fastest)
        elif each.needs is not None:
            yield *each.name, f"needs {micro_batches(each.needs)}"
        else:
            yield *each.name, f"not timed: {each.problem}"


def compared(run: Run) -> list[Name]:
    """Return the engines of the page: plain torch, 1F1B of each, and the fastest of ours and of the rivals."""
    names = {IN_ONE_THREAD, IN_TWO_THREADS, PIPELINE_ENGINE}
    timed = sorted(run.timed, key=attrgetter("median_s"))
    names |= {each.name for each in timed if is_ours(each) and (each.schedule == "1f1b" or each.engine == OURS_AUTO)}
    ours = [each for each in timed if is_ours(each)]
    sliced = [each for each in ours if each.engine != OURS]
    for engines in ([each for each in ours if each.engine == OURS], sliced, filter(is_rival, timed)):
        names |= {each.name for each in [*engines][:1]}
    return [each.name for each in run.engines if each.name in names]


def table(document: Document, run: Run) -> str:
    """Return the table of one number of micro-batches with the engines of the page, with a heading."""
    tokens = f"{document.micro_batch_size} x {document.model['tokens']} tokens"
    section = Section(f"{micro_batches(run.num_micro_batches)} of {tokens}", COLUMNS)
    names = compared(run)
    for row in rows(document, run):
        if row[:2] in names:
            section.add(*row)
    return section.markdown()


def write_all(document: Document, path: Path) -> None:
    """Write the rows of all engines as CSV, with the number of micro-batches in front."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["micro-batches", *COLUMNS])
        for run in document.runs:
            for row in rows(document, run):
                writer.writerow([run.num_micro_batches, *(cell.strip("*") for cell in row)])


def _cells(each: Measured, run: Run, num_ranks: int, *, bold: bool) -> Iterator[str]:
    mark = "**" if bold else ""
    yield f"{mark}{each.median_s:.3f}{mark}"
    yield f"{min(each.seconds):.3f} to {max(each.seconds):.3f}"
    for name in (IN_ONE_THREAD, PIPELINE_ENGINE):
        base = next((other for other in run.timed if other.name == name), None)
        yield "" if base is None else f"{mark}{base.median_s / each.median_s:.2f}{mark}"
    yield f"{each.idle_share(num_ranks):.0%}"
    yield " / ".join(f"{size / MEGABYTE:.0f}" for size in each.peak_bytes)
    yield f"{each.gradient_difference:.0e}" if each.gradient_difference else "the same"


def results_markdown(document: Document, picture: str) -> str:
    """Return the text of the page about a measurement."""
    parts = [f"![Seconds of a step of every engine]({picture})"]
    for run in document.runs:
        parts += [table(document, run), *_list(findings(run))]
    return "\n\n".join([*parts, "### Circumstances", *_list(circumstances(document))])


def _list(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


WIDTH, LABELS, VALUES = 900, 375, 50
ROW, BAR, HEAD, FOOT = 22, 13, 40, 22
COLOURS = {PLAIN: "#b1b8c0", DEEPSPEED: "#e3b341", TORCH: "#b392f0", OURS: "#9ecbff"}
WITH_TOKEN_SLICES = "#388bfd"
SMALL = 'font-size="12"'
IDEAL = 'class="ideal" stroke="#6e7781" stroke-width="1.2" stroke-dasharray="4 3"'
"""The line that a perfect pipeline reaches, over the bars."""


def draw(measurement: Document) -> str:
    """Return the picture of a measurement: a panel for each number of micro-batches."""
    body: list[str] = []
    y = float(MARGIN)
    for run in measurement.runs:
        body += _panel(run, measurement.num_ranks, y)
        y += HEAD + ROW * len(run.engines) + FOOT
    legend = {**COLOURS, "ours, with token slices": WITH_TOKEN_SLICES}
    x = float(MARGIN)
    for name, colour in legend.items():
        body += [rect(x, y, 11, 11, f'rx="2" fill="{colour}"'), text(x + 16, y + 6, name, f"{SOFT} {SMALL} {MIDDLE}")]
        x += 36 + 6.6 * len(name)
    title = "Seconds of a step on two ranks"
    said = "; ".join(
        f"{micro_batches(run.num_micro_batches)}: fastest {min(run.timed, key=attrgetter('median_s')).name}"
        for run in measurement.runs
        if run.timed
    )
    return document(body, WIDTH, y + MARGIN, title, f"{title}. {said}.")


def _panel(run: Run, num_ranks: int, top: float) -> Iterator[str]:
    timed = sorted(run.timed, key=attrgetter("median_s"))
    longest = max((max(each.seconds) for each in timed), default=1.0)
    scale = (WIDTH - 2 * MARGIN - LABELS - VALUES) / longest
    left = MARGIN + LABELS
    head = f"{micro_batches(run.num_micro_batches)}: seconds of a step, median and range"
    yield text(MARGIN, top + 8, head, f'{INK} font-size="15" font-weight="600" {MIDDLE}')
    first_row, end = top + HEAD, top + HEAD + ROW * len(timed)
    for number, each in enumerate(timed):
        yield from _bar(each, first_row + ROW * number, left, scale)
    alone = next((each.median_s for each in timed if each.name == IN_ONE_THREAD), None)
    if alone is not None:
        x = left + scale * alone / num_ranks
        yield f'<path d="M{x:.2f},{first_row - 8:.2f} V{end:.2f}" {IDEAL}/>'
        yield text(x, first_row - 14, f"one thread / {num_ranks}", f'{SOFT} font-size="11" text-anchor="middle"')
    untimed = [each for each in run.engines if not each.seconds]
    for number, each in enumerate(untimed, start=len(timed)):
        middle = first_row + ROW * number + ROW / 2
        yield _label(each, middle)
        why = f"needs {each.needs} micro-batches" if each.needs is not None else "not timed: see the table"
        yield text(left + 4, middle, why, f"{SOFT} {SMALL} {MIDDLE}")


def _bar(each: Measured, top: float, left: float, scale: float) -> Iterator[str]:
    middle = top + ROW / 2
    yield _label(each, middle)
    colour = COLOURS.get(each.engine, WITH_TOKEN_SLICES)
    yield rect(left, middle - BAR / 2, scale * each.median_s, BAR, f'rx="2" fill="{colour}"')
    least, most = (left + scale * seconds for seconds in (min(each.seconds), max(each.seconds)))
    # A line with ends, in a colour that is legible on bars and on pages, light or dark.
    ends = f"M{least:.2f},{middle - 4:.2f} v8 M{least:.2f},{middle:.2f} H{most:.2f} M{most:.2f},{middle - 4:.2f} v8"
    yield f'<path d="{ends}" class="range" stroke="#57606a" fill="none" stroke-width="1.2"/>'
    yield text(most + 6, middle, f"{each.median_s:.2f}", f"{INK} {SMALL} {MIDDLE}")


def _label(each: Measured, middle: float) -> str:
    return text(MARGIN + LABELS - 8, middle, str(each.name), f'{INK} {SMALL} text-anchor="end" {MIDDLE}')


DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "benchmarks" / "engines.md"
PICTURE = DOCS / "img" / "engines.svg"


def main(argv: Sequence[str] | None = None) -> int:
    """Write page and picture, and all rows (CSV) and times (JSON) beside the page."""
    parser = Parser(description=__doc__)
    parser.add_argument("times", type=Path, help="the JSON of a measurement")
    parser.add_argument("--document", type=Path, default=PAGE, metavar="FILE", help="the page, with its markers")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    options = parser.parse_args(argv)
    measurement = Document.read(options.times)
    options.picture.write_text(draw(measurement), encoding="utf-8")
    link = Path(os.path.relpath(options.picture, options.document.parent)).as_posix()
    page = written_between(options.document.read_text(encoding="utf-8"), results_markdown(measurement, link))
    options.document.write_text(page, encoding="utf-8")
    measurement.write(options.document.with_suffix(".json"))
    write_all(measurement, options.document.with_suffix(".csv"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
