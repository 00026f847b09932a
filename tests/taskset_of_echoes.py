"""A taskset and a tool, as users of `verifiers` write them."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    worth: float = 0.01


class Config(vf.TaskConfig):
    tools: bool = False
    fails: bool = False


class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)


class Echo(vf.Task[Data, vf.State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())] if config.tools else []

    @vf.reward(weight=2.0)
    async def characters(self, trace) -> float:
        if self.config.fails:
            raise OSError("the scale is broken")
        return self.data.worth * len(trace.last_reply or "")


class TasksetConfig(vf.TasksetConfig):
    most: int = 20
    task: Config = Config()


class Echoes(vf.Taskset[Echo, TasksetConfig]):
    def load(self):
        for i in range(self.config.most):
            yield Echo(Data(prompt="ab" * i + "+", system_prompt="k"), self.config.task)


__all__ = ["Echoes"]

if __name__ == "__main__":
    Tools.run()
