"""Files that the search reads."""

from pathlib import Path

from megatron_terapipe.search.inputs.cluster_files import read_cluster_with_notes
from tests.faults.fuzzing.target import Target


def _read_hostfile(data: bytes, folder: Path) -> None:
    file = folder / "hostfile"
    file.write_bytes(data)
    read_cluster_with_notes(str(file), device="A100-80GB")


TARGETS = (
    Target(
        name="hostfile",
        read=_read_hostfile,
        seeds=(
            b"worker-0 slots=8\nworker-1 slots=8 max_slots=16\n",
            b"# a comment\n\n10.0.0.1 slots=2\n[::1] slots=4\n",
        ),
        found=(b"a slots=" + b"9" * 5000,),
    ),
)
