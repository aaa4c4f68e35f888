"""Print `docs/reference/commands.md`."""

from megatron_terapipe.command.reference import markdown

if __name__ == "__main__":
    print(markdown(), end="")
