"""Those whom the policy talks with: environments and tools of the user's own, each conversation in its own process.

stage.py holds the conversations of a run and waits for none of them; forks.py makes the processes, actor.py is what
runs in one, here.py the same without processes. schemas.py says what tools there are. The room knows how rewards are
confined; it does not know tokens, models or files.
"""
