"""`pellucid prefixes`: the first sentences of thinking about a task's questions, by a teacher or a student model.

command.py finds which prefixes are missing and asks a local model for them, or teacher.py an OpenAI-compatible
endpoint. cleaning.py makes a prefix of an answer, and journal.py writes it to the file. Torch is only imported for a
student, so that asking a teacher starts fast.
"""
