"""Pipeline engines side by side: ours, DeepSpeed's and torch's, with the same weights and data, in one run.

`plain_gpt` is the model in plain torch, which the rivals run and all are held against. `catalogue` lists the engines,
`agreement` holds their numbers against plain torch, `turns` takes their times, `results` is what is kept of it, and
`table`, `picture` and `page` show it.
"""
