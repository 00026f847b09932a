"""An environment with two agents, of which the second is not trained, as users of `verifiers` write it."""

import verifiers.v1 as vf


class PairConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.critic.trainable = False

    async def run(self, task, agents):
        await agents.speaker.run(task)
        await agents.critic.run(task)


__all__ = ["Pair"]
