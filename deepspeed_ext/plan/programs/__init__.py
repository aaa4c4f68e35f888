"""Programs: what every pipeline rank runs, instruction by instruction, and the proof that they end.

| file | says |
|---|---|
| `program` | instructions, programs and the channels that messages take |
| `simulated_schedule` | a schedule with the timeline that its programs are lowered from |
| `posting` | where both ends of every message are posted |
| `lowering` | the programs of a schedule |
| `reductions` | which op completes a stage's gradients, and when their sums end |
| `host_copies` | what waits on the host while nothing reads it, and where its copies are posted |
| `copy_lanes` | when these copies run, for the simulators |
| `order_checks` | whether the two ends of a channel agree, and each op finds what it reads on its device |
| `device` | a model of devices on which every program is proven to end |
"""
