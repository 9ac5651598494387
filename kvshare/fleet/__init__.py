"""
Several vLLM replicas as one engine. Plans are made here; `kvshare.vllm_connector` executes them.

    engine.py          VllmEngine: starts and stops the parts, reports their status
    routed_request.py  one request, from the client to the journal
    rendering.py       has vLLM turn its body into tokens; token_lists.py: reads them out of its answer
    rendered_media.py  the images that it found in a prompt
    router.py          chooses its replica, plan and ticket
    tickets.py         from a plan to a ticket
    replica.py         one vLLM and its connector, and all of them as the fleet
    client.py          HTTP to both
    watcher.py         health and journal of one replica, all the time
    reconciler.py      applies journals to tree, index and requests in flight
    observation.py     what a finished request teaches about costs
    start_measurement.py  measures them before requests do, by own_requests.py
    in_flight.py       requests whose replica has not reported yet
    replica_keeper.py  stores and evicts prompts whose KV is in the replicas
    report_draft.py    from a replica's report to the node that is stored
    orphans.py         what they hold and no prompt uses
    remote_tier.py     which replica holds which segment
    known_disks.py     which replicas have a disk, over restarts
    format_guard.py    refuses formats that would end a vLLM

Its sister is `kvshare.embedded`: both run on `kvshare.runtime`, and neither knows the other.
"""
