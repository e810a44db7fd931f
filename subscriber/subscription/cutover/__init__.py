"""Switch an application from the publisher to the target of a subscription, and back.

One engine moves the writers from a *source* to a *destination* (:mod:`.move`). A cutover moves them from the publisher (the old database)
to the target (the new database); a rollback moves them in the other direction. The steps:

==================  ===========================================================  ==================================================
step                what it does                                                 what undoes it
==================  ===========================================================  ==================================================
prepare             makes what the way back needs, beside its slot                removes it
close_destination   keeps writers out of the destination                         opens it, unless the switch was begun
close_source        keeps writers out of the source, and ends its sessions       opens it: always the first thing that is undone
drain               proves that nothing can commit there any more; gives an LSN  -
catch_up            waits until everything up to the LSN is durable there        -
verify              compares the rows                                            -
stop                stops the subscription at the end of the source's WAL        lets it run again
way_back            makes the subscription of the opposite direction             removes it
sequences           sets the sequences of the destination                        -
switch              runs the user's command                                      -
==================  ===========================================================  ==================================================

What a move has done is known from one record: the row of ``subscriber.fence`` in the source
(:mod:`subscriber.walreceiver.fences.fence_row`). It must be there, because the source is closed and opened in the transaction that
changes the record, also when the other database cannot be reached::

    no row --begin--> begun --close_source--> closed --leave--> left --finish--> moved (after a rollback: kept)
                        |                       |
                        +---------undo----------+--> undone --forget--> no row

Before ``left``, an error, the end of the time, and a process that was killed lead to the same :meth:`~.move.Move.undo`. A process that
finds an interrupted move undoes it, and begins again: a step is never continued in the middle, so no step is recorded. From ``left`` on,
:meth:`~.move.Move.finish` lets writers into the destination, and is repeated until it succeeds. ``close_destination`` comes first and
the destination is opened last, so writers are never in both databases.

One process works on a cutover: it has the lock of the source, and holds the record while it makes a step that changes something elsewhere
(:meth:`subscriber.walreceiver.fences.fence.Fence.held`). If it loses the lock, another process undoes its move. It changes nothing more
then, because each move has another number.

With a pool (:mod:`.clients`), step ``pause`` is made before ``close_source``, and the clients are resumed as soon as a database takes
writes: the source after it was opened again, or the destination. The record has the names of the entries that may be paused.

The *way back* is made while both databases are closed and hold the same rows. Its slot begins there: nothing is copied, and no change of
the forward direction comes back. A cutover makes a new subscription, whose catalog is in the old database. After it, the old slot is
dropped, so that the old database keeps no WAL for it. A rollback makes a new slot for the first subscription.
"""
