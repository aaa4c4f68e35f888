"""What the report adds to the style of the timelines' page."""

STYLE = """
body { max-width: 1280px; }
h2 { margin: 0 0 8px; font-size: 16px; font-weight: 600; }
.sub { margin: 2px 0 14px; color: var(--soft); }
.winner { font-size: 17px; font-weight: 600; margin: 2px 0 12px; }
.facts { display: flex; flex-wrap: wrap; gap: 10px 40px; }
.facts b { display: block; font-size: 21px; font-weight: 600; line-height: 1.25; }
.facts span { color: var(--soft); font-size: 12px; }
section {
  margin: 14px 0; padding: 14px 18px; border: 1px solid var(--line); border-radius: 10px; background: var(--card);
}
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { padding: 4px 12px 4px 0; color: var(--soft); font-size: 12px; font-weight: 500; text-align: right; }
td { padding: 4px 12px 4px 0; border-top: 1px solid var(--line); text-align: right; }
th.left, td.left { text-align: left; }
tr.first td { font-weight: 600; }
tr.out td { color: var(--soft); }
td.left.why { white-space: normal; min-width: 260px; }
pre {
  margin: 0; padding: 10px 12px; overflow-x: auto; border-radius: 6px; background: var(--track); font-size: 12.5px;
  white-space: pre-wrap; word-break: break-word;
}
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 10px; color: var(--soft); font-size: 12px; }
.legend .entry { display: inline-flex; align-items: center; gap: 6px; }
.legend i { width: 13px; height: 13px; border-radius: 3px; }
.bars {
  display: grid; grid-template-columns: minmax(120px, 34%) 1fr max-content; gap: 5px 12px; align-items: center;
}
.bars .row { display: contents; }
.bars .label { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-size: 12.5px; }
.bars .track { position: relative; display: flex; height: 18px; border-radius: 4px; background: var(--track); }
.bars .track > span:first-child { border-radius: 4px 0 0 4px; }
.bars .limit { position: absolute; top: -3px; bottom: -3px; width: 2px; margin-left: -1px; background: var(--accent); }
.bars .figure {
  min-width: 74px; text-align: right; white-space: nowrap; font-size: 12.5px; font-variant-numeric: tabular-nums;
}
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 18px; }
iframe { width: 100%; border: 0; }
ul { margin: 0; padding-left: 18px; }
"""
