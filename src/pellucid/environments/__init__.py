"""Those whom the policy talks with: environments and tools of the user's own, each conversation in its own process.

stage.py holds the conversations of a run and waits for none of them; forks.py makes the processes, actor.py is what
runs in one, here.py the same without processes. schemas.py says what tools there are. agent.py runs in a process, too:
an agent, which asks the policy by itself (serve/rollouts.py), such as an episode of verifiers.py. The room knows how
rewards are confined; it does not know tokens, models or files.
"""
