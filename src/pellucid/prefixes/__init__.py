"""`pellucid prefixes`: how a teacher or a student begins to think about the questions of a task.

command.py asks for what is missing, teacher.py an OpenAI-compatible endpoint, student.py a local model; cleaning.py
makes a prefix of what they wrote, and journal.py keeps it. The room knows tasks and settings; only its student knows a
model, so that asking a teacher starts without torch.
"""
