"""`halfbyte board`: pages over run folders, on this machine. Imports no torch; commands run in child processes.

series.py       numbers of metrics.jsonl by column, read from the last offset
folders.py      finds runs, and reads summaries, notes and files of a run tolerantly
curves.py       curves and histograms as inline SVG, reduced to the resolution of a screen
pages.py        the frame of a page, and the pages Runs and Run
tables.py       the pages Compare and Data
queue_pages.py  the pages Queue and New run
chat.py         the page Chat, and its engine as a child process
engine.py       the program of that process
actions.py      what a page may change: stop, queue, notes, the trash; each is one command line
guard.py        the token's cookie, host names, origins of writes, and headers of every response
app.py          routes
run.py          the address, the token and the server
"""
