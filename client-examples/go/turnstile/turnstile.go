// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

// Package turnstile is a small client for the locks of the Turnstile module, over redigo. One file, to copy into a
// folder turnstile of your module; or, with the sources beside yours, without copying:
//
//	go mod edit -require example.org/turnstile-go@v0.0.0 -replace example.org/turnstile-go=../turnstile/client-examples/go
//
// and import "example.org/turnstile-go/turnstile".
//
//	lock := turnstile.New(pool, "table:12", turnstile.Options{Lease: 10 * time.Second, Wait: 5 * time.Second})
//	err := lock.With(ctx, func(ctx context.Context, h *turnstile.Hold) error {
//		_, err := h.Run("SET", "table:12:guest", "alice") // written only while this hold has the lock
//		return err
//	})
//
// While the work runs, the lease is renewed at each third of it. When the hold is lost, ctx is cancelled
// and h.Err says why. Hand h.Token to every store outside that can refuse a token lower than one it has seen.
//
// A lock that is free is taken, and every lock is renewed and released, over connections of the pool. A call that stands
// in line has one of its own, dialled as the pool dials, and a few of them are kept for the next ones; so is a session.
//
// Dial the pool's connections with time-outs (redis.DialConnectTimeout, DialReadTimeout), and set
// DialContext rather than Dial, so that connecting can be cancelled too.
package turnstile

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/gomodule/redigo/redis"
)

// To be matched with errors.Is. Whatever else comes is redigo's own: a redis.Error is a reply of the server,
// all others are trouble with the connection.
var (
	ErrNotAcquired = errors.New("turnstile: others hold the lock")
	ErrLost        = errors.New("turnstile: the hold is lost")
	ErrMaxHold     = errors.New("turnstile: held for the maximum time")
	ErrFenced      = errors.New("turnstile: the token does not hold the lock, nothing was written")
	ErrDeadlock    = errors.New("turnstile: waiting would close a cycle")
	ErrSuperseded  = errors.New("turnstile: the wait was ended from outside") // or the server was demoted
	ErrWaitLimit   = errors.New("turnstile: too many wait on this server")
	ErrNotPrimary  = errors.New("turnstile: this server is a replica")
	ErrMoved       = errors.New("turnstile: the cluster keeps this lock elsewhere") // look it up and ask again
)

var errorOf = map[string]error{
	"FENCED":      ErrFenced,
	"DEADLOCK":    ErrDeadlock,
	"UNBLOCKED":   ErrSuperseded,
	"WAITLIMIT":   ErrWaitLimit,
	"READONLY":    ErrNotPrimary,
	"MOVED":       ErrMoved,
	"ASK":         ErrMoved,
	"TRYAGAIN":    ErrMoved,
	"CLUSTERDOWN": ErrMoved,
}

// Options of a lock.
type Options struct {
	Lease   time.Duration // how long the lock outlives a holder that died; 10 s if not set
	Wait    time.Duration // how long to stand in line; 0: one try
	MaxHold time.Duration // renew no longer than this and tell the work; 0: as long as the work takes
	Timeout time.Duration // how long the server may be slow or away, on top of Wait; 2 s if not set
	Owner   string        // a new random one for each hold if not set, see New

	Shared  bool          // together with other shared holders
	Limit   int           // up to so many holders
	Weight  int           // with Limit: for how many of them this one counts; 1 if not set
	MaxLine int           // do not join a line of so many; 0: any
	Tag     string        // what LOCK.INFO and errors show of this hold; not a secret, as the owner is
	Session bool          // the hold also ends when this process, and so its connection, does
	Linger  time.Duration // after a crash the lock stays closed for so much longer
	Also    []string      // these locks too, all or none, under one token; but see Hold.Run
}

// Lock names a lock and how to take it. Any number of goroutines may share one.
type Lock struct {
	pool *redis.Pool
	key  string
	o    Options
}

// New makes a Lock and talks to nobody yet.
//
// The server sees a deadlock only if it knows who waits for whom. So a worker that takes one lock while it
// holds another gives both the same Options.Owner: a random string of its own, never shared with another
// goroutine, because for the server the same owner is the same holder. An Acquire that fails releases what it
// may have got, unless the owner has another Hold of the same lock from the same pool: that one is kept. So an
// upgrade that is cancelled leaves the shared hold as it is; if it was granted in the same moment, that hold is
// exclusive and has a new token.
func New(pool *redis.Pool, key string, o Options) *Lock {
	if o.Lease == 0 {
		o.Lease = 10 * time.Second
	}
	if o.Timeout == 0 {
		o.Timeout = 2 * time.Second
	}
	o.Lease = o.Lease.Truncate(time.Millisecond) // what the server counts in: ours must not be longer
	return &Lock{pool, key, o}
}

// With takes the lock, does the work and gives the lock up, also when the work fails or panics. The work's
// ctx is cancelled when the hold is lost. The work's own error comes first; but if all it says is that ctx
// was cancelled because of the hold, With says what happened to the hold.
func (l *Lock) With(ctx context.Context, work func(context.Context, *Hold) error) (err error) {
	h, err := l.Acquire(ctx)
	if err != nil {
		return err
	}
	defer func() {
		why := h.Err()
		released := h.Release()
		if err == nil {
			err = released
		} else if why != nil && errors.Is(err, context.Canceled) && ctx.Err() == nil {
			err = why
		}
	}()
	return work(h.Context(ctx), h)
}

// Acquire takes the lock, or stands in line for it for Options.Wait. ctx is for the acquiring only. When it is
// cancelled, Acquire returns as soon as the server has confirmed that nothing is held and nobody waits, or
// after Options.Timeout.
func (l *Lock) Acquire(ctx context.Context) (*Hold, error) { return l.acquire(ctx, l.o.Wait) }

// TryAcquire takes the lock if that is possible at once.
func (l *Lock) TryAcquire(ctx context.Context) (*Hold, error) { return l.acquire(ctx, 0) }

func (l *Lock) acquire(caller context.Context, wait time.Duration) (*Hold, error) {
	// As long as the owner is the same, asking twice is safe: the server answers with the same token. So
	// after a lost reply or a reconnect we simply ask again.
	owner := l.o.Owner
	if owner == "" {
		owner = newOwner()
	}
	waitEnd := time.Now().Add(wait)
	ctx, cancel := context.WithDeadline(caller, waitEnd.Add(l.o.Timeout)) // longer than the wait
	defer cancel()
	n := line{lock: l, own: l.o.Session}
	unsure := false // whether the server may have granted a hold that we do not know of
	for {
		sent := time.Now()
		token, err := redis.Int64(n.ask(ctx, owner, time.Until(waitEnd)))
		switch {
		case err == redis.ErrNil && !n.own && time.Until(waitEnd) >= time.Millisecond:
			n.close()
			n.own = true
			continue
		case err == redis.ErrNil:
			n.close()
			return nil, l.notAcquired()
		case err == nil && ctx.Err() == nil && time.Since(sent) < l.o.Lease/3:
			return l.newHold(&n, owner, token, sent), nil
		case err == nil && ctx.Err() == nil:
			// We stood in line, so the lease began somewhere in the time that the call took. Asking once
			// more, without waiting, starts it anew: then we know a moment that it cannot have begun before.
			unsure, waitEnd = true, sent
			continue
		case err == nil:
			unsure = true // granted too late
			err = ctx.Err()
		case !isReply(err):
			unsure = unsure || n.sent
			if pause(ctx, retryPause) {
				continue
			}
		}
		// A newer call of the same owner may have taken over the place: then it is not ours to give up.
		if newer := errors.Is(translate(err), ErrSuperseded) && l.o.Owner != ""; unsure && !newer {
			n.leave(owner)
		}
		n.close()
		if caller.Err() != nil {
			return nil, caller.Err()
		}
		return nil, translate(err)
	}
}

// line is the connection on which a lock is asked for: one of the pool for a try. A call that waits keeps its
// connection busy, and a session ends with its connection. Such calls get a connection of their own, which also leaves
// the pool to those who renew.
type line struct {
	lock   *Lock
	own    bool
	conn   redis.Conn
	sent   bool        // whether the server may have heard of us
	answer chan answer // to a request that nobody waits for any more; nil: there is none
}

type answer struct {
	reply interface{}
	err   error
}

func (n *line) ask(ctx context.Context, owner string, wait time.Duration) (interface{}, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := n.connect(ctx); err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	timeout := time.Until(deadline)
	if timeout <= 0 { // which redigo would take for no time-out
		return nil, context.DeadlineExceeded
	}
	if !n.own {
		wait = 0
	}
	n.sent = true
	conn, answers := n.conn, make(chan answer, 1)
	if err := conn.Send("LOCK.ACQUIRE", n.lock.args(owner, n.lock.options(wait)...)...); err != nil {
		return nil, err
	}
	if err := conn.Flush(); err != nil {
		return nil, err
	}
	go func() {
		reply, err := redis.ReceiveWithTimeout(conn, timeout+n.lock.o.Timeout) // so long may leave take
		answers <- answer{reply, err}
	}()
	select {
	case a := <-answers:
		return a.reply, a.err
	case <-ctx.Done():
		n.answer = answers
		return nil, ctx.Err()
	}
}

// leave ends the wait and gives up what may have been granted. Closing the connection is not enough: the server
// may hand us the lock before it notices. If this fails too, the lease ends what we may hold.
func (n *line) leave(owner string) {
	l := n.lock
	if l.heldElsewhere() {
		return // an upgrade: a release would give up the older hold too, so the wait ends with its connection
	}
	release := func(timeout time.Duration) { l.call(timeout, "LOCK.RELEASE", l.args(owner)...) }
	if n.answer == nil {
		release(l.o.Timeout)
		return
	}
	if n.conn.Send("LOCK.RELEASE", l.args(owner)...) == nil {
		n.conn.Flush() // behind the request: it may arrive when we have gone
	}
	for end := time.Now().Add(l.o.Timeout); time.Until(end) > 0; {
		release(time.Until(end))
		select {
		case a := <-n.answer:
			n.answer = nil
			if a.err == nil && a.reply != nil {
				release(l.o.Timeout) // granted after all
			}
			redis.ReceiveWithTimeout(n.conn, l.o.Timeout) // of the release: then the connection is as good as before
			return
		case <-time.After(retryPause): // perhaps the release has overtaken the request: then it did nothing
		}
	}
}

func (n *line) connect(ctx context.Context) (err error) {
	if n.conn != nil && n.conn.Err() == nil {
		return nil
	}
	n.close()
	var conn redis.Conn
	if n.own {
		conn, err = takeWaiting(ctx, n.lock.pool)
	} else {
		conn, err = n.lock.pool.GetContext(ctx)
	}
	if err == nil {
		n.conn = conn
	}
	return err
}

// close gives the connection back, if nothing is left unread on it.
func (n *line) close() {
	conn, answers := n.conn, n.answer
	n.conn, n.answer = nil, nil
	switch {
	case conn == nil:
	case n.own && (n.lock.o.Session || answers != nil || conn.Err() != nil):
		conn.Close()
	case n.own:
		keepWaiting(n.lock.pool, conn)
	case answers != nil:
		// The pool reads what is unread before it takes a connection back, and another goroutine may still do so.
		go func() {
			<-answers
			conn.Close()
		}()
	default:
		conn.Close()
	}
}

// The connections that have waited and are kept for the next ones, for a minute at most: after that nothing is left of
// a pool that nobody uses any more.
const (
	keepIdle = 4
	keepTime = time.Minute
)

var idle = struct {
	sync.Mutex
	conns map[*redis.Pool][]redis.Conn // the last one is the youngest
}{conns: map[*redis.Pool][]redis.Conn{}}

func takeWaiting(ctx context.Context, pool *redis.Pool) (redis.Conn, error) {
	idle.Lock()
	if conns := idle.conns[pool]; len(conns) > 0 {
		conn := conns[len(conns)-1]
		idle.conns[pool] = conns[:len(conns)-1]
		idle.Unlock()
		return conn, nil
	}
	idle.Unlock()
	if pool.DialContext != nil {
		return pool.DialContext(ctx)
	}
	return pool.Dial()
}

func keepWaiting(pool *redis.Pool, conn redis.Conn) {
	idle.Lock()
	defer idle.Unlock()
	if len(idle.conns[pool]) >= keepIdle {
		conn.Close()
		return
	}
	idle.conns[pool] = append(idle.conns[pool], conn)
	time.AfterFunc(keepTime, func() { dropIdle(pool, conn) })
}

// CloseIdle closes the connections that have waited and are kept for the next ones. Call it when you have closed the
// pool; if you do not, they close by themselves after a minute.
func CloseIdle(pool *redis.Pool) {
	idle.Lock()
	defer idle.Unlock()
	for _, conn := range idle.conns[pool] {
		conn.Close()
	}
	delete(idle.conns, pool)
}

// dropIdle closes the connection, unless it is in use.
func dropIdle(pool *redis.Pool, conn redis.Conn) {
	idle.Lock()
	defer idle.Unlock()
	for i, c := range idle.conns[pool] {
		if c == conn {
			idle.conns[pool] = append(idle.conns[pool][:i:i], idle.conns[pool][i+1:]...)
			conn.Close()
			break
		}
	}
	if len(idle.conns[pool]) == 0 {
		delete(idle.conns, pool)
	}
}

// notAcquired says who has the lock and for how long, by the tags: an owner is a proof, so it is not shown.
func (l *Lock) notAcquired() error {
	for _, key := range l.keys() {
		info := fields(l.call(l.o.Timeout, "LOCK.INFO", key))
		holders, _ := redis.Values(info["holders"], nil)
		if len(holders) == 0 {
			continue
		}
		first := fields(holders[0], nil)
		who, err := redis.String(first["tag"], nil)
		if err != nil {
			who = "another owner"
		}
		left, _ := redis.Int64(first["lease-left-ms"], nil)
		waiting, _ := redis.Int64(info["waiting"], nil)
		return fmt.Errorf("%w: %s is held by %s for another %d ms, %d wait", ErrNotAcquired, key, who, left, waiting)
	}
	return ErrNotAcquired
}

// fields makes a map of a reply; an empty one if it cannot.
func fields(reply interface{}, err error) map[string]interface{} {
	m := map[string]interface{}{}
	values, err := redis.Values(reply, err)
	for i := 0; err == nil && i+1 < len(values); i += 2 {
		if name, err := redis.String(values[i], nil); err == nil {
			m[name] = values[i+1]
		}
	}
	return m
}

func (l *Lock) options(wait time.Duration) []interface{} {
	options := []interface{}{"PX", l.o.Lease.Milliseconds()}
	if ms := wait.Milliseconds(); ms > 0 {
		options = append(options, "WAIT", ms)
		if l.o.MaxLine > 0 {
			options = append(options, "MAXLINE", l.o.MaxLine)
		}
	}
	if l.o.Shared {
		options = append(options, "SHARED")
	}
	if l.o.Limit > 0 {
		options = append(options, "LIMIT", l.o.Limit)
	}
	if l.o.Weight > 0 {
		options = append(options, "WEIGHT", l.o.Weight)
	}
	if l.o.Tag != "" {
		options = append(options, "TAG", l.o.Tag)
	}
	if l.o.Session {
		options = append(options, "SESSION")
	}
	if l.o.Linger > 0 {
		options = append(options, "LINGER", l.o.Linger.Milliseconds())
	}
	return options
}

// args are what all commands of an owner have in common: the key, the owner, options, the other keys.
func (l *Lock) args(owner string, options ...interface{}) []interface{} {
	args := append([]interface{}{l.key, owner}, options...)
	if len(l.o.Also) > 0 {
		args = append(args, "ALSO", len(l.o.Also))
		for _, key := range l.o.Also {
			args = append(args, key)
		}
	}
	return args
}

// The holds whose owner the caller chose: other calls may use the same owner.
var held = struct {
	sync.Mutex
	holds map[*Hold]bool
}{holds: map[*Hold]bool{}}

// heldElsewhere says whether another call got one of these locks for the same owner, and its hold lasts.
func (l *Lock) heldElsewhere() bool {
	held.Lock()
	defer held.Unlock()
	for h := range held.holds {
		if h.lock.pool != l.pool || h.Owner != l.o.Owner {
			continue
		}
		for _, a := range h.lock.keys() {
			for _, b := range l.keys() {
				if a == b {
					return true
				}
			}
		}
	}
	return false
}

func (l *Lock) keys() []string { return append([]string{l.key}, l.o.Also...) }

// call sends a command that answers at once, on a connection of the pool.
func (l *Lock) call(timeout time.Duration, command string, args ...interface{}) (interface{}, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	conn, err := l.pool.GetContext(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return redis.DoWithTimeout(conn, timeout, command, args...)
}

// Hold is a lock that was acquired. Its methods may be called from any goroutine.
type Hold struct {
	Token int64 // larger than that of every earlier holder
	Owner string

	lock  *Lock
	line  *line         // kept open for a session
	done  chan struct{} // closed when the hold is over, lost or released
	lease *time.Timer   // fires when the lease may be over
	max   *time.Timer

	mu       sync.Mutex
	until    time.Time // when the lease may be over
	over     bool
	released bool
	err      error
}

func (l *Lock) newHold(n *line, owner string, token int64, sent time.Time) *Hold {
	if !l.o.Session {
		n.close()
	}
	h := &Hold{Token: token, Owner: owner, lock: l, line: n, done: make(chan struct{})}
	h.mu.Lock() // the timers may fire before they are set
	defer h.mu.Unlock()
	// By our clock, from before the request: the server cannot have started the lease earlier.
	h.until = sent.Add(l.o.Lease)
	h.lease = time.AfterFunc(time.Until(h.until), func() {
		h.finish(fmt.Errorf("%w: could not renew it in time", ErrLost))
	})
	if l.o.MaxHold > 0 {
		h.max = time.AfterFunc(time.Until(sent.Add(l.o.MaxHold)), func() { h.finish(ErrMaxHold) })
	}
	if l.o.Owner != "" {
		held.Lock()
		held.holds[h] = true
		held.Unlock()
	}
	go h.renew(sent)
	return h
}

// renew touches the lock at each third of the lease, so that one failure costs nothing. On a failure it
// goes on trying: the timer of the lease decides when it is too late.
func (h *Hold) renew(sent time.Time) {
	timer := time.NewTimer(time.Until(sent.Add(h.lock.o.Lease / 3)))
	defer timer.Stop()
	for {
		select {
		case <-h.done:
			return
		case <-timer.C:
		}
		next := time.Now().Add(h.lock.o.Lease / 3)
		if h.Touch() != nil {
			next = time.Now().Add(h.lock.o.Lease / 10)
		}
		timer.Reset(time.Until(next))
	}
}

// Touch starts the lease anew now. The hold does that by itself; call it before a step that must not be cut
// short. ErrLost if the hold is gone or was released.
func (h *Hold) Touch() error {
	h.mu.Lock()
	over := h.whyOver()
	h.mu.Unlock()
	if over != nil {
		return over
	}
	sent := time.Now()
	lease := h.lock.o.Lease
	n, err := redis.Int(h.lock.call(lease/3, "LOCK.TOUCH", h.lock.args(h.Owner, "PX", lease.Milliseconds())...))
	if err != nil {
		return translate(err) // nothing is known yet
	}
	if n != 1+len(h.lock.o.Also) {
		h.finish(fmt.Errorf("%w: the server no longer knows it", ErrLost))
		return ErrLost
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.over {
		h.until = sent.Add(lease)
		h.lease.Reset(time.Until(h.until))
	}
	return h.whyOver()
}

// whyOver says why no more may be done with the hold. Under the mutex.
func (h *Hold) whyOver() error {
	if h.released && h.err == nil {
		return fmt.Errorf("%w: it was released", ErrLost)
	}
	return h.err
}

// Run runs a command if and only if this hold still has the lock, in one step of the server. Else ErrFenced.
// With Options.Also it looks at the first lock only, the one that New was given: name the lock that guards
// what is written first.
func (h *Hold) Run(command string, args ...interface{}) (interface{}, error) {
	fence := append([]interface{}{h.lock.key, h.Token, "THEN", command}, args...)
	reply, err := h.lock.call(h.lock.o.Timeout, "LOCK.FENCE", fence...)
	err = translate(err)
	if errors.Is(err, ErrFenced) {
		h.finish(fmt.Errorf("%w: %v", ErrLost, err))
	}
	return reply, err
}

// Release gives the lock up. ErrLost if it was not ours to the end: then the work may have had company.
// After the first call it does nothing.
func (h *Hold) Release() error {
	h.mu.Lock()
	again := h.released
	h.released = true
	h.mu.Unlock()
	if again {
		return nil
	}
	h.finish(nil)
	defer h.line.close()
	all := 1 + len(h.lock.o.Also)
	n, err := h.release()
	if err != nil && !isReply(err) {
		// Perhaps only the reply was lost, so once more. Then 0 means that the first try did it if the lease
		// lasts yet; but a session may have ended together with the connection.
		n, err = h.release()
		if err == nil && n == 0 && !h.lock.o.Session && h.lasts() {
			n = all
		}
	}
	switch why := h.Err(); {
	case errors.Is(why, ErrLost):
		return why
	case err != nil:
		return fmt.Errorf("turnstile: not known to be released: %w", translate(err))
	case n != all:
		return ErrLost
	}
	return nil
}

func (h *Hold) lasts() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Before(h.until)
}

func (h *Hold) release() (int, error) {
	return redis.Int(h.lock.call(h.lock.o.Timeout, "LOCK.RELEASE", h.lock.args(h.Owner)...))
}

// Done is closed when the hold is over: lost, held for the maximum time, or released.
func (h *Hold) Done() <-chan struct{} { return h.done }

// Err says why the hold is over: ErrLost, ErrMaxHold, or nil if it is not or was released.
func (h *Hold) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Context is cancelled when the hold is over or parent is.
func (h *Hold) Context(parent context.Context) context.Context {
	ctx, cancel := context.WithCancel(parent)
	go func() {
		defer cancel()
		select {
		case <-h.done:
		case <-ctx.Done():
		}
	}()
	return ctx
}

func (h *Hold) finish(why error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return
	}
	h.over, h.err = true, why
	held.Lock()
	delete(held.holds, h)
	held.Unlock()
	h.lease.Stop()
	if h.max != nil {
		h.max.Stop()
	}
	close(h.done)
}

const retryPause = 50 * time.Millisecond

// pause returns false if ctx is over first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

func isReply(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

// translate gives the replies that a caller may want to tell apart errors of their own.
func translate(err error) error {
	if !isReply(err) {
		return err
	}
	word, _, _ := strings.Cut(err.Error(), " ")
	if known := errorOf[word]; known != nil {
		return fmt.Errorf("%w: %s", known, err)
	}
	return err
}

func newOwner() string {
	var bytes [16]byte
	if _, err := rand.Read(bytes[:]); err != nil {
		panic(err) // a system without randomness
	}
	return hex.EncodeToString(bytes[:])
}
