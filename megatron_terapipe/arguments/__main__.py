"""Print `docs/reference/arguments.md`."""

from megatron_terapipe.arguments.help import markdown

if __name__ == "__main__":
    print(markdown(), end="")
