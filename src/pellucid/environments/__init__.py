"""Environments, tools and agents of the user's own, with which the policy has conversations.

`spec.py` describes the conversations of a task, and `pool.py` runs many of them without waiting for any single one.
`worker.py` runs in the process of one conversation, as does `agents.py`: an agent queries the policy by itself
(`serve/agent_endpoint.py`), such as an episode of `verifiers.py`. Nothing here knows tokens, models or files.
"""
