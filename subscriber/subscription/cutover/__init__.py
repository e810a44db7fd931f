"""Switch an application from the publisher to the target of a subscription, and back.

One engine moves the writers from a *source* to a *destination* (:mod:`.move`). A cutover moves them from the publisher (the old database)
to the target (the new database); a rollback moves them in the other direction. The steps:

==================  ===========================================================  ==================================================
step                what it does                                                 what undoes it
==================  ===========================================================  ==================================================
close_destination   keeps writers out of the destination                         opens it, unless the switch was begun
close_source        keeps writers out of the source, and ends its sessions       opens it: always the first thing that is undone
drain               proves that nothing can commit there any more; gives an LSN  -
catch_up            waits until everything up to the LSN is durable there        -
verify              compares the rows                                            -
stop                stops the subscription at the end of the source's WAL        lets it run again
way_back            makes the subscription of the opposite direction             removes it
sequences           sets the sequences of the destination                        -
switch              runs the user's command                                      -
open                lets writers into the destination                            nothing: from here a rollback is the way
==================  ===========================================================  ==================================================

Each step is recorded in the target's catalog, in table ``cutover``, before it begins and after it was made. A process that was killed has
left the rows: the next one continues with the first step that was not made. Every step may be made twice. If the source's fence is gone,
or time is up, everything is undone instead. ``close_destination`` comes first and ``open`` last, so writers are never in both databases.
Before ``open``, the source's fence notes that writers leave it: a process that has lost its session with the target cannot undo what
another one continues (:mod:`subscriber.walreceiver.fences.fence`).

The *way back* is made while both databases are closed and hold the same rows. Its slot begins there: nothing is copied, and no change of
the forward direction comes back. A cutover makes a new subscription, whose catalog is in the old database. After it, the old slot is
dropped, so that the old database keeps no WAL for it. A rollback makes a new slot for the first subscription.
"""
