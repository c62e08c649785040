"""Finding who is to blame for a script that fails: what is switched off run by run, and what each
run shows. ``fuseboard bisect`` is made of it.
"""
