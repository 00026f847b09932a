"""The microscope: what each step did to each token of a run, on a page and in the terminal.

reading.py answers what is asked of a run folder, with steps.py, summaries.py, why.py and sentences.py; both the page
and the terminal (terminal.py) show that. server.py gives it to the page while a run trains, packing.py puts it into one
file that needs no server; the page itself is in page/, joined by assembly.py. The room knows records and files: no
torch.
"""
