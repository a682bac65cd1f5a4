// The quorum protocol of section 4 of the contract, for Spin: three servers, two clients, one lock.
// README.md says what is modelled and what is left out; ./check runs it.
//
// Wrong on purpose, to see that the properties can fail:
//   NO_SECOND_ROUND   T is taken after the first round
//   COUNT_ABOVE       answers above T count as well
//   NO_MARGIN         a server that restarts begins its clock at nothing
//   NO_GRACE          a server that restarts grants at once what it has forgotten
// ONLY=property watches one property, because the search stops at the first that fails.

#ifndef MAX_TOKEN
#define MAX_TOKEN 4  // Only the order of tokens counts. A server that issued this one is done.
#endif
#define TRIES 2  // Of each client. Each has an owner that is never used again.

#define ORDER 1      // Each holder's token is larger than that of the holder before.
#define EXCLUSION 2  // At most one holder is inside its validity time.
#define REGISTER 3   // The fenced register takes no write after a write by a later holder.
#define FOUR 4       // Not a property: fails when all four tries succeed, which must be possible.
#ifdef ONLY
#define WATCHED(property) (ONLY == property)
#else
#define WATCHED(property) (property != FOUR)
#endif
bool order_broken, exclusion_broken, register_broken, four_holders;

// The servers.
#define FREE 0
#define BY(c) (1 + (c))
byte holder[3];  // FREE, or BY the client whose present try has the hold.
byte token[3];   // Of that hold.
byte clock[3];   // The highest token issued or seen.

// The clients. A set of servers is three bits.
byte tries[2];   // How many are over.
byte first[2];   // The servers whose answer in the first round arrived.
byte second[2];  // The servers whose answer in the second round counts.
byte T[2];
bool inside[2];  // Has obtained T and is inside the validity time.

// Who obtained what, and what the register remembers.
byte obtained[2];   // The last token with which this client was a holder.
byte latest;        // The client that became a holder last.
byte holders;       // How many there have been; counted for FOUR only.
byte highest;       // The largest token among the writes that the register took.
bool overtaken[2];  // It has taken a write by a later holder than this one.

byte next, answer;  // Scratch, 0 between steps.

#define BIT(s) (1 << (s))
#define HAS(set, s) ((set) & BIT(s))
#define MAJORITY(set) ((set) == 3 || (set) >= 5)
#define OTHER(c) (1 - (c))
#define MAX(a, b) ((a) > (b) -> (a) : (b))

// The answers on which a client's T rests. Inside the validity time those holds last, because each
// lease is longer and began later. This is the only thing that the model assumes about time.
#ifdef NO_SECOND_ROUND
#define RELIED(c) first[c]
#else
#define RELIED(c) second[c]
#endif

// Any other hold may end at any time: released, expired, deleted, forgotten. Nothing sees a hold
// but the next request, so it is that request which finds it gone, or finds it there.
#define LASTS(c, s) (holder[s] == BY(c) && HAS(RELIED(c), s))

// The servers are alike, and so are the clients: the first to be used is number 0, the next is
// number 1. This spares the search the copies of each run that differ by numbers only.
#define IN_TURN(c, s) ((c == 0 || clock[0] > 0) && (s == 0 || clock[s - 1] > 0))

#define MAY_GRANT(c, s) (!LASTS(OTHER(c), s) && clock[s] < MAX_TOKEN && IN_TURN(c, s))
#define MAY_ANSWER(c, s) (holder[s] == BY(c) || MAY_GRANT(c, s))

// LOCK.ACQUIRE without WAIT by client c at server s, with FLOOR if `least` is not 0.
inline Acquire(c, s, least) {
  if
  :: holder[s] == BY(c) -> answer = MAX(token[s], least)
  :: MAY_GRANT(c, s) ->
     // The wall clock has gone on or jumped forward: any value above what was issued.
     next = clock[s] + 1;
     do
     :: next < MAX_TOKEN -> next++
     :: break
     od;
     answer = MAX(next, least);
     next = 0
  fi;
  holder[s] = BY(c);
  token[s] = answer;
  clock[s] = MAX(clock[s], answer);
  printf("client %d asks server %d with floor %d: %d\n", c, s, least, answer)
}

// A request, what the server does and the arrival of the answer are one step, because no one else
// sees the answer and the client does nothing with it until it ends the round. A lost request and
// the answer null are a step that is not taken. A lost reply is noted by nobody, and the client may
// ask again.
#define FIRST_ROUND(c, s) \
  :: atomic { \
       tries[c] < TRIES && !HAS(first[c], s) && MAY_ANSWER(c, s) -> \
       Acquire(c, s, 0); \
       if \
       :: first[c] = first[c] | BIT(s); T[c] = MAX(T[c], answer) \
       :: printf("  (not counted)\n") \
       fi; \
       answer = 0 \
     }

#define SECOND_ROUND(c, s) \
  :: atomic { \
       !HAS(second[c], s) && MAY_ANSWER(c, s) -> \
       Acquire(c, s, T[c]); \
       if \
       :: COUNTS(answer, T[c]) -> second[c] = second[c] | BIT(s) \
       :: printf("  (not counted)\n") \
       fi; \
       answer = 0 \
     }

#ifdef COUNT_ABOVE
#define COUNTS(a, floor) ((a) >= (floor))
#else
#define COUNTS(a, floor) ((a) == (floor))
#endif

inline Obtain(c) {
  d_step {
    MAJORITY(RELIED(c)) ->
    printf("client %d is a holder with token %d\n", c, T[c]);
    order_broken = WATCHED(ORDER) && T[c] <= obtained[latest];
    assert(!order_broken);
    exclusion_broken = WATCHED(EXCLUSION) && inside[OTHER(c)];
    assert(!exclusion_broken);
    holders = (WATCHED(FOUR) -> holders + 1 : 0);
    four_holders = (holders == 4);
    assert(!four_holders);
    inside[c] = true;
    obtained[c] = T[c];
    latest = c;
    overtaken[c] = false;
    first[c] = RELIED(c);  // This and T are not needed any more: fewer states.
    T[c] = 0
  }
}

// The end of a try, before or after it obtained T: the client gives up, dies, or is out of validity
// time. Its releases may arrive, be late or be lost, so from here on each of its holds may end at
// any time. One that stays does to others what a lost request does, so none need be remembered.
// A client that died is one that takes no further step, or one that was started again.
inline Over(c) {
  d_step {
    tries[c] < TRIES ->
    printf("client %d ends this try\n", c);
    tries[c]++;
    EndHold(c, 0);
    EndHold(c, 1);
    EndHold(c, 2);
    first[c] = 0;
    second[c] = 0;
    T[c] = 0;
    inside[c] = false
  }
}

inline EndHold(c, s) {
  if
  :: holder[s] == BY(c) -> holder[s] = FREE; token[s] = 0
  :: else
  fi
}

active [2] proctype Client() {
begin:
end:
  do
  FIRST_ROUND(_pid, 0)
  FIRST_ROUND(_pid, 1)
  FIRST_ROUND(_pid, 2)
#ifdef NO_SECOND_ROUND
  :: Obtain(_pid); break
#else
  :: MAJORITY(first[_pid]) -> break
#endif
  :: Over(_pid)
  od;

#ifndef NO_SECOND_ROUND
  do
  SECOND_ROUND(_pid, 0)
  SECOND_ROUND(_pid, 1)
  SECOND_ROUND(_pid, 2)
  :: Obtain(_pid); break
  :: Over(_pid); goto begin
  od;
#endif

  Over(_pid);
  goto begin
}

// A write of a holder may arrive at any time: inside the validity time, after it, and when the
// client has begun again or died.
#define WRITE(c) \
  :: d_step { \
       obtained[c] > 0 && obtained[c] >= highest -> \
       printf("the register takes a write of client %d with token %d\n", c, obtained[c]); \
       register_broken = WATCHED(REGISTER) && overtaken[c]; \
       assert(!register_broken); \
       highest = obtained[c]; \
       overtaken[OTHER(c)] = overtaken[OTHER(c)] || c == latest \
     }

active proctype Register() {
end:
  do
  WRITE(0)
  WRITE(1)
  od
}

// A server restarts with nothing. With margin and grace this needs no step of its own, whoever
// restarts and how often: the margin starts the clock above all that was issued, and from there it
// goes on anyway; the grace keeps the server closed while anybody may rely on a hold that it has
// forgotten, as the hold did; and the other holds may end at any time, restart or not. Without one
// of the two, one restart is enough.
#if defined(NO_MARGIN) || defined(NO_GRACE)
bool restarted;

#ifdef NO_MARGIN
#define START_CLOCK(s) clock[s] = 0
#define CLOSED(s) (LASTS(0, s) || LASTS(1, s))
#else
#define START_CLOCK(s) skip
#define CLOSED(s) false
#endif

#define RESTART(s) \
  :: d_step { \
       !restarted && !CLOSED(s) -> \
       printf("server %d restarts\n", s); \
       restarted = true; \
       holder[s] = FREE; \
       token[s] = 0; \
       START_CLOCK(s) \
     }

active proctype Servers() {
end:
  do
  RESTART(0)
  RESTART(1)
  RESTART(2)
  od
}
#endif
