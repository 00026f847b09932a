"""Environments, tools and agents of the user's own, with which the policy has conversations.

`spec.py` is what a task says of its conversations, `pool.py` holds those under way and waits for none of them,
`worker.py` runs in the process of one. `agents.py` runs there, too: an agent, which asks the policy by itself
(`serve/agent_endpoint.py`), such as an episode of `verifiers.py`. Nothing here knows tokens, models or files.
"""
