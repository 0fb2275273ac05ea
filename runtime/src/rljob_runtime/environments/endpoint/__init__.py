"""The endpoint that agent programs talk to: OpenAI's HTTP interface in front of the job's engines.

::

    program ── POST /v1/chat/completions ──> server ──> requests: what it asks ──> chat: text of the prompt
                                                                                      |
       <── JSON or server-sent events ── answers <── session <── engines <── Call <── conversation: token ids behind those so far

A call continues the episode's sample whose prompt and response its own prompt begins with: sampled ids are never encoded again (EXACT).
Where there is none, as after a template or the program rewrote the history, it begins a sample of its own.
"""
