"""The microscope: what each step did to each token of a run, on a page and in the terminal.

run_reader.py reads a run folder, with the help of steps.py, group_history.py, diagnosis.py and sentences.py. The page
and the terminal (terminal.py) show its results. server.py serves them to the page while a run trains; single_file.py
writes them into one file that needs no server. The page itself is in page/, and page.py makes its HTML. Nothing here
imports torch.
"""
