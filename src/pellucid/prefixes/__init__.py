"""`pellucid prefixes`: the first sentences of thinking about a task's questions, by a teacher or a student model.

command.py finds which prefixes are missing and asks for them: teacher.py asks an OpenAI-compatible endpoint, student.py
a local model. cleaning.py makes a prefix of what they wrote, and journal.py keeps it. The room knows tasks and
settings; only its student knows policies and samplers, so that asking a teacher starts without torch.
"""
