"""Workers that come late, or again: how they get into a job that goes on.

    newcomer                     server                         the others, first of all the first of them
    a notice in the store  --->  connects to it
    KNOCK, again and again --->  "not yet"
                                 who is at the door  <-------   ROLL, at the beginning of every exchange, together
                                 keeps the state     <-------   GIVE: the first, when what they exchanged has landed
                                 counts on it        <-------   ADMIT: the first, at every server
    TAKE                   --->  sends the state
    ROLL                   --->  counts it in        <-------   ROLL

ADMIT stands between two exchanges in what the first worker says to every server, and no exchange is complete without
the first: so all servers count on the newcomer from the same exchange on, though nobody told the other workers. All
hear of the new number by the answer to the ROLL in which it takes part. Nobody needs a process group.

A job begins in the same way: when as many as it is to begin with have knocked, the one with the lowest number comes in
by itself and gives its own state to the others.
"""
