"""Words of a launch on several hosts: DeepSpeed's pdsh launcher hands them to the shells of other hosts as they are.

It puts words with blanks between double quotes, and quotes nothing else (`PDSHRunner` in
deepspeed/launcher/multinode_runner.py, 0.19.8): a path with `;` or `$(...)` would run a command on every host.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from megatron_terapipe.errors import ConfigError

_WORD = re.compile(r"[\w@+=:,./ -]*")
_FOLDER = re.compile(r"[\w@+=:,./-]*")
"""Of the folder that is entered on every host, which DeepSpeed never quotes."""

RULE = "which the shells of other hosts would read: use letters, digits and _@+=:,./- alone"

SHELL_CHECK = f"""if [ "${{launch[0]}}" = deepspeed ]; then
    # DeepSpeed hands these words to the shells of the other hosts without quotes, and enters this directory there.
    for word in "${{PWD// /\\\\ }}" "$trainer" "$here" "$@"; do
        case "$word" in *[![:alnum:]_@+=:,./\\ -]*)
            printf 'error: %q has characters {RULE}\\n' "$word" >&2
            exit 2 ;;
        esac
    done
    # DeepSpeed sends these to the other hosts and prints them, and the trainer reads none: passwords may be among them.
    unset ${{!MLFLOW@}}
fi
"""
"""Lines of a script that see that the words of its array `launch`, and those behind it, may be sent."""


def check_remote_words(words: Iterable[str], folder: Path | None = None) -> None:
    """See that the shells of other hosts leave the words of a launch as they are.

    Args:
        folder: where the launcher is started; None = not known yet.

    Raises:
        ConfigError: naming the first word that a shell would read otherwise.
    """
    wrong = next((word for word in words if not _WORD.fullmatch(word)), None)
    if wrong is None and folder is not None and not _FOLDER.fullmatch(str(folder)):
        wrong = str(folder)
    if wrong is not None:
        raise ConfigError(f"{json.dumps(wrong)} has characters {RULE}")
