"""The command `terapipe`: one entry to all commands, which also run as modules of their own.

main (the table of all; finds and runs one) --> the command's module: `build_parser(prog)`, `main(argv, prog)`
     -> overview (`terapipe --help`)
     -> reference (docs/extensions/commands_page.py), completion (of shells): all parsers, built once

Parsers are argparse's, because the flags of the trainer are derived from its configuration. The script of completion is
static: one that asked the program at each key press would load the parser of the trainer each time.
"""
