"""All that reaches torch's private APIs, a module for each subject.

What moved between 2.11 and 2.14 is probed by signature or attribute, never by version; each module
says which of torch's files it was read against.
"""
