"""Programs: what every pipeline rank runs, instruction by instruction, and the proof that they end.

| file | says |
|---|---|
| `program` | instructions, programs, the channels of messages, and sums of gradients over replicas |
| `host_copies` | what waits on the host while nothing reads it, and when its copies run |
| `device` | a model of devices on which every program is proven to end |
| `lowering` | a schedule with its timeline, where messages are posted, and the programs of all ranks |
"""
