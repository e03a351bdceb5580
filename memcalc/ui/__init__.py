"""One local page on which a job is put together: the bar moves with the controls, and the link holds the job.

A thin shell: a request becomes one call of the library (`answers`), made in a process that can be ended (`workers`),
and what it answers is shown by the renderer of reports. `app` starts it and speaks HTTP, `page` is what a
browser shows.
"""
