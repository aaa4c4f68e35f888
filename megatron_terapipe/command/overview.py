"""The text of `terapipe --help`: every command in one line, by group."""

from collections.abc import Iterator

from megatron_terapipe.command.commands import GROUPS

SUMMARY = "Train GPTs whose sequences are pipelined in token slices; plan such runs; prepare data and models for them."


def overview(prog: str) -> str:
    """Return the help of the command as a whole; `prog` is what people type."""
    return "\n".join(_lines(prog)) + "\n"


def listed() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the title of each group with its commands: the words that call one, and what it is for."""
    return [
        (
            group.title,
            [
                line
                for command in group.commands
                for line in (
                    [(f"{command.name} {part.name}", part.summary) for part in command.parts]
                    or [(command.name, command.summary)]
                )
            ],
        )
        for group in GROUPS
    ]


def _lines(prog: str) -> Iterator[str]:
    groups = listed()
    width = max(len(name) for _, commands in groups for name, _ in commands)
    yield SUMMARY
    yield ""
    yield f"usage: {prog} COMMAND [flags]"
    for title, commands in groups:
        yield from ("", f"{title}:")
        yield from (f"  {name:<{width}}  {summary}" for name, summary in commands)
    yield from ("", "flags:")
    yield f"  {'-h, --help':<{width}}  show this text; with a command, show its flags"
    yield f"  {'--version':<{width}}  print the versions of this project, Python, torch and DeepSpeed"
    yield from ("", "examples:")
    yield f"  {prog} search rank llama2-7b hostfile --device A100-80GB --global-batch-size 64"
    yield f"  {prog} train --hostfile hostfile --model-preset llama2-7b --seq-length 4096 ..."
    yield f"  {prog} generate --help"
    yield from (
        "",
        "read on: README.md, docs/index.md; every command and flag: docs/reference/commands.md, arguments.md",
    )
