// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

package turnstile_test

// Each test talks to a real server with the module: TURNSTILE_MODULE and REDIS_SERVER name them.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gomodule/redigo/redis"

	"example.org/turnstile-go/turnstile"
)

const (
	patience = 10 * time.Second       // for what must happen; longer means that it will not
	slack    = 250 * time.Millisecond // what a busy machine may add to a delay
)

var (
	ctx       = context.Background()
	sentinels = []error{
		turnstile.ErrNotAcquired, turnstile.ErrLost, turnstile.ErrMaxHold, turnstile.ErrFenced, turnstile.ErrDeadlock,
		turnstile.ErrSuperseded, turnstile.ErrWaitLimit, turnstile.ErrNotPrimary, turnstile.ErrMoved,
	}
	owners = map[string]func() string{
		"a random owner":     func() string { return "" },
		"the caller's owner": func() string { return fmt.Sprint("worker ", atomic.AddInt64(&ownersMade, 1)) },
	}
	ownersMade int64
)

func TestOneHolderAtATime(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	lock := turnstile.New(s.pool, "k", turnstile.Options{})
	first := acquire(t, lock)
	_, err := lock.TryAcquire(ctx)
	wantError(t, err, turnstile.ErrNotAcquired)
	wantEqual(t, s.do("LOCK.FENCE", "k"), first.Token)
	want(t, first.Release())
	want(t, first.Release()) // once more does nothing
	want(t, first.Err())
	wantError(t, first.Touch(), turnstile.ErrLost)
	wantEqual(t, s.info("stale_touches"), 0) // it did not even ask
	wantEqual(t, s.do("EXISTS", "k"), int64(0))

	second := acquire(t, lock)
	if second.Token <= first.Token || second.Owner == first.Owner || len(second.Owner) < 32 {
		t.Errorf("%+v after %+v", second, first)
	}
	want(t, second.Touch())
	want(t, second.Release())
}

func TestWaitingInLine(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	// The pool's read time-out, 200 ms, is shorter than both waits: it must not end them.
	lock := turnstile.New(s.pool, "k", turnstile.Options{Wait: 700 * time.Millisecond})
	first := acquire(t, lock)
	start := time.Now()
	_, err := lock.Acquire(ctx)
	wantError(t, err, turnstile.ErrNotAcquired)
	wantBetween(t, time.Since(start), 690*time.Millisecond, 700*time.Millisecond+slack)
	wantEqual(t, s.info("waits"), 1) // in one go
	start = time.Now()
	_, err = lock.TryAcquire(ctx)
	wantError(t, err, turnstile.ErrNotAcquired)
	wantBetween(t, time.Since(start), 0, slack)

	second := make(chan *turnstile.Hold)
	go func() {
		hold, _ := turnstile.New(s.pool, "k", turnstile.Options{Wait: patience}).Acquire(ctx)
		second <- hold
	}()
	s.awaitInfo(t, "waiters", 1)
	want(t, first.Release())
	if hold := <-second; hold == nil || hold.Token <= first.Token {
		t.Errorf("%+v after %+v", hold, first)
	} else {
		want(t, hold.Release())
	}
}

// A lock that is free needs the pool only, and whoever waits in line a connection that was used so before.
func TestConnectionsAreUsedAgain(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	lock := turnstile.New(s.pool, "k", turnstile.Options{Wait: patience})
	want(t, acquire(t, lock).Release())
	before := s.connections()
	for i := 0; i < 30; i++ {
		want(t, lock.With(ctx, func(context.Context, *turnstile.Hold) error { return nil }))
		first := acquire(t, lock)
		_, err := lock.TryAcquire(ctx)
		wantError(t, err, turnstile.ErrNotAcquired)
		want(t, first.Release())
	}
	wantEqual(t, s.connections(), before)
	wantEqual(t, s.clients("laddr="), 1+s.pool.ActiveCount()) // the operator's and the pool's

	// One that gets the lock, one whose wait runs out, one that is cancelled: all use the same.
	short := turnstile.New(s.pool, "k", turnstile.Options{Wait: 2 * time.Millisecond})
	for i := 0; i < 15; i++ {
		s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
		_, err := short.Acquire(ctx)
		wantError(t, err, turnstile.ErrNotAcquired)
		waiting, cancel := context.WithCancel(ctx)
		cancelled := s.waiter(waiting, lock)
		s.awaitInfo(t, "waiters", 1)
		cancel()
		if r := <-cancelled; r.err != context.Canceled {
			t.Fatalf("got %v", r.err)
		}
		served := s.waiter(ctx, lock)
		s.awaitInfo(t, "waiters", 1)
		s.do("LOCK.RELEASE", "k", "other")
		want(t, (<-served).hold.Release())
	}
	// One that waits, and as many of the pool as are busy at a time.
	if n := s.connections() - before; n > 3 {
		t.Errorf("%d new connections for 45 waits", n)
	}

	// Many at a time: as many connections, but only a few are kept.
	s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
	var all []<-chan result
	for i := 0; i < 12; i++ {
		all = append(all, s.waiter(ctx, turnstile.New(s.pool, "k", turnstile.Options{Wait: patience, Limit: 12})))
	}
	s.awaitInfo(t, "waiters", 12)
	s.do("LOCK.RELEASE", "k", "other")
	for _, one := range all {
		want(t, (<-one).hold.Release())
	}
	await(t, "four are kept", func() bool { return s.clients("laddr=") == 1+s.pool.ActiveCount()+4 })
	turnstile.CloseIdle(s.pool)
	await(t, "none is kept", func() bool { return s.clients("laddr=") == 1+s.pool.ActiveCount() })
	s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
	served := s.waiter(ctx, lock)
	s.awaitInfo(t, "waiters", 1)
	s.do("LOCK.RELEASE", "k", "other")
	want(t, (<-served).hold.Release())

	// Those that the server has closed meanwhile do no harm.
	s.do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
	s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
	served = s.waiter(ctx, lock)
	s.awaitInfo(t, "waiters", 1)
	s.do("LOCK.RELEASE", "k", "other")
	want(t, (<-served).hold.Release())
}

// A grant after a wait that was longer than the lease must not look as if it were over already.
func TestALongWaitForAShortLease(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.do("LOCK.ACQUIRE", "k", "other", "PX", 1200)
	hold := acquire(t, turnstile.New(s.pool, "k", turnstile.Options{Lease: 600 * time.Millisecond, Wait: patience}))
	select {
	case <-hold.Done():
		t.Error(hold.Err())
	case <-time.After(900 * time.Millisecond):
	}
	want(t, hold.Release())
	wantEqual(t, s.info("reacquired"), 1)
}

func TestWithAlwaysReleases(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	lock := turnstile.New(s.pool, "k", turnstile.Options{})
	own := errors.New("own")
	var inside *turnstile.Hold
	err := lock.With(ctx, func(ctx context.Context, h *turnstile.Hold) error {
		inside = h
		wantEqual(t, s.do("LOCK.FENCE", "k"), h.Token)
		return own
	})
	if err != own {
		t.Errorf("got %v", err)
	}
	wantEqual(t, s.do("EXISTS", "k"), int64(0))
	<-inside.Done()

	func() {
		defer func() { wantEqual(t, recover(), "oops") }()
		lock.With(ctx, func(context.Context, *turnstile.Hold) error { panic("oops") })
	}()
	wantEqual(t, s.do("EXISTS", "k"), int64(0))

	// The release fails too: the work's own error comes first. Without one, the loss is told.
	lose := func(err error) func(context.Context, *turnstile.Hold) error {
		return func(context.Context, *turnstile.Hold) error { s.do("DEL", "k"); return err }
	}
	if err := lock.With(ctx, lose(own)); err != own {
		t.Errorf("got %v", err)
	}
	wantError(t, lock.With(ctx, lose(nil)), turnstile.ErrLost)

	cancelled, cancel := context.WithCancel(ctx)
	err = lock.With(cancelled, func(ctx context.Context, h *turnstile.Hold) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	})
	if err != context.Canceled {
		t.Errorf("got %v", err)
	}
	wantEqual(t, s.do("EXISTS", "k"), int64(0))
}

func TestRenewal(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	lock := turnstile.New(s.pool, "k", turnstile.Options{Lease: 300 * time.Millisecond})
	hold := acquire(t, lock)
	for end := time.Now().Add(5 * 300 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		wantEqual(t, s.do("LOCK.FENCE", "k"), hold.Token)
	}
	want(t, hold.Err())
	if n := s.info("touched"); n < 8 || n > 16 {
		t.Errorf("touched %d times", n)
	}
	want(t, hold.Release())
	wantEqual(t, s.do("EXISTS", "k"), int64(0))
}

func TestTouchStartsTheLeaseAnew(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	hold := acquire(t, turnstile.New(s.pool, "k", turnstile.Options{Lease: time.Minute}))
	time.Sleep(100 * time.Millisecond)
	before := s.do("PEXPIRETIME", "k").(int64)
	want(t, hold.Touch())
	if after := s.do("PEXPIRETIME", "k").(int64); after < before+90 {
		t.Errorf("from %d to %d", before, after)
	}
	s.do("DEL", "k")
	wantError(t, hold.Touch(), turnstile.ErrLost)
	wantError(t, hold.Err(), turnstile.ErrLost)
	wantError(t, hold.Release(), turnstile.ErrLost)
}

func TestTheWorkIsToldThatTheHoldIsLost(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	const lease = 900 * time.Millisecond
	lock := turnstile.New(s.pool, "k", turnstile.Options{Lease: lease})
	var told time.Duration
	err := lock.With(ctx, func(ctx context.Context, h *turnstile.Hold) error {
		start := time.Now()
		s.do("DEL", "k")
		<-ctx.Done()
		told = time.Since(start)
		wantError(t, h.Err(), turnstile.ErrLost)
		return ctx.Err()
	})
	wantError(t, err, turnstile.ErrLost)
	wantBetween(t, told, 0, lease/3+slack)
}

func TestASilentServerLosesTheHoldAtTheEndOfTheLease(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"stopped": syscall.SIGSTOP, "killed": syscall.SIGKILL} {
		signal := signal
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			const lease = time.Second
			before := time.Now()
			hold := acquire(t, turnstile.New(s.pool, "k", turnstile.Options{Lease: lease, Timeout: slack}))
			after := time.Now()
			s.signal(signal)
			awaitDone(t, hold)
			wantBetween(t, time.Since(before), lease, after.Sub(before)+lease+slack)
			wantError(t, hold.Err(), turnstile.ErrLost)
			wantError(t, hold.Release(), turnstile.ErrLost)
		})
	}
}

func TestAShortSilenceCostsNothing(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	const lease = 1500 * time.Millisecond
	hold := acquire(t, turnstile.New(s.pool, "k", turnstile.Options{Lease: lease}))
	s.signal(syscall.SIGSTOP)
	time.Sleep(lease * 6 / 10)
	s.signal(syscall.SIGCONT)
	select {
	case <-hold.Done():
		t.Error(hold.Err())
	case <-time.After(lease):
	}
	want(t, hold.Release())
}

func TestMaximum(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	const lease, max = 300 * time.Millisecond, 800 * time.Millisecond
	lock := turnstile.New(s.pool, "k", turnstile.Options{Lease: lease, MaxHold: max})
	start := time.Now()
	hold := acquire(t, lock)
	awaitDone(t, hold)
	wantBetween(t, time.Since(start), max, max+slack)
	wantError(t, hold.Err(), turnstile.ErrMaxHold)
	wantError(t, hold.Touch(), turnstile.ErrMaxHold)
	// Nobody renews it now, and nobody has released it.
	await(t, "the lease ends", func() bool { return s.do("EXISTS", "k") == int64(0) })
	wantBetween(t, time.Since(start), max, max+lease+slack)
	wantError(t, hold.Release(), turnstile.ErrLost)

	err := lock.With(ctx, func(ctx context.Context, _ *turnstile.Hold) error { <-ctx.Done(); return ctx.Err() })
	wantError(t, err, turnstile.ErrMaxHold)
	wantEqual(t, s.do("EXISTS", "k"), int64(0))
}

func TestALostReply(t *testing.T) {
	for name, wait := range map[string]time.Duration{"of a try": 0, "of a wait": time.Second} {
		wait := wait
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			p := startProxy(t, s.address)
			p.lose("LOCK.ACQUIRE", 2)
			hold := acquire(t, turnstile.New(p.pool, "k", turnstile.Options{Wait: wait}))
			wantEqual(t, p.lost(), 2)
			wantEqual(t, s.info("acquired"), 1)
			wantEqual(t, s.info("reacquired"), 2)
			wantEqual(t, s.do("LOCK.FENCE", "k"), hold.Token)
			want(t, hold.Release())
			wantEqual(t, s.do("EXISTS", "k"), int64(0))
		})
	}
}

func TestAConnectionLostInLine(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
	got := make(chan *turnstile.Hold)
	go func() {
		hold, _ := turnstile.New(s.pool, "k", turnstile.Options{Wait: patience}).Acquire(ctx)
		got <- hold
	}()
	for i := int64(1); i <= 2; i++ {
		s.awaitInfo(t, "waiters", 1)
		s.do("CLIENT", "KILL", "ID", s.blockedClient())
		await(t, "it stands in line again", func() bool { return s.info("waits") == i+1 })
	}
	s.do("LOCK.RELEASE", "k", "other")
	if hold := <-got; hold == nil {
		t.Error("not acquired")
	} else {
		want(t, hold.Release())
	}
}

func TestGivingUpLeavesNothingBehind(t *testing.T) {
	for name, hang := range map[string]bool{"cut": false, "silent": true} {
		hang := hang
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			p := startProxy(t, s.address)
			p.hang = hang
			p.lose("LOCK.ACQUIRE", 1<<30)
			start := time.Now()
			_, err := turnstile.New(p.pool, "k",
				turnstile.Options{Wait: 300 * time.Millisecond, Timeout: 400 * time.Millisecond}).Acquire(ctx)
			if err == nil || isSentinel(err) {
				t.Errorf("got %v", err)
			}
			wantBetween(t, time.Since(start), 600*time.Millisecond, 1100*time.Millisecond+slack) // two time-outs
			wantEqual(t, s.info("acquired"), 1)
			wantEqual(t, s.do("EXISTS", "k"), int64(0))

			// Nor in the name of an owner that the caller has chosen.
			mine := turnstile.Options{Timeout: 200 * time.Millisecond, Owner: "worker"}
			_, err = turnstile.New(p.pool, "k", mine).Acquire(ctx)
			if err == nil || isSentinel(err) {
				t.Errorf("got %v", err)
			}
			wantEqual(t, s.info("acquired"), 2)
			wantEqual(t, s.do("EXISTS", "k"), int64(0))

			// But what that owner holds through another call is kept.
			p.lose("LOCK.ACQUIRE", 0)
			older := acquire(t, turnstile.New(p.pool, "k", mine))
			p.lose("LOCK.ACQUIRE", 1<<30)
			_, err = turnstile.New(p.pool, "k", mine).Acquire(ctx)
			if err == nil || isSentinel(err) {
				t.Errorf("got %v", err)
			}
			want(t, older.Touch())
			want(t, older.Release())
			wantEqual(t, s.do("EXISTS", "k"), int64(0))
		})
	}
}

func TestALostReplyToARelease(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	p := startProxy(t, s.address)
	hold := acquire(t, turnstile.New(p.pool, "k", turnstile.Options{}))
	p.lose("LOCK.RELEASE", 1)
	want(t, hold.Release()) // the second try gets 0, and while the lease lasts only the first can have done it
	wantEqual(t, p.lost(), 1)
	wantEqual(t, s.do("EXISTS", "k"), int64(0))

	// With a session, or after the lease, it can have been lost as well.
	hold = acquire(t, turnstile.New(p.pool, "k", turnstile.Options{Session: true}))
	p.lose("LOCK.RELEASE", 1)
	wantError(t, hold.Release(), turnstile.ErrLost)
	p = startProxy(t, s.address)
	p.hang = true
	hold = acquire(t, turnstile.New(p.pool, "k",
		turnstile.Options{Lease: 300 * time.Millisecond, Timeout: 500 * time.Millisecond}))
	p.lose("LOCK.RELEASE", 1)
	wantError(t, hold.Release(), turnstile.ErrLost)

	// No answer at all: nobody can know.
	p = startProxy(t, s.address)
	hold = acquire(t, turnstile.New(p.pool, "k", turnstile.Options{}))
	p.lose("LOCK.RELEASE", 2)
	if err := hold.Release(); err == nil || isSentinel(err) {
		t.Errorf("nobody can know, but: %v", err)
	}
	wantEqual(t, s.do("EXISTS", "k"), int64(0))
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.signal(syscall.SIGKILL)
	_, err := turnstile.New(s.pool, "k", turnstile.Options{Timeout: slack}).Acquire(ctx)
	var trouble net.Error
	if !errors.As(err, &trouble) || isSentinel(err) {
		t.Errorf("got %v", err)
	}
}

func TestCancellationInLine(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
	lock := turnstile.New(s.pool, "k", turnstile.Options{Wait: time.Minute})
	waiting, cancel := context.WithCancel(ctx)
	result := make(chan error)
	go func() {
		_, err := lock.Acquire(waiting)
		result <- err
	}()
	s.awaitInfo(t, "waiters", 1)
	start := time.Now()
	cancel()
	if err := <-result; err != context.Canceled {
		t.Errorf("got %v", err)
	}
	wantBetween(t, time.Since(start), 0, slack)
	s.awaitInfo(t, "waiters", 0)
	s.do("LOCK.RELEASE", "k", "other")
	wantEqual(t, s.do("EXISTS", "k"), int64(0))

	late, cancel := context.WithTimeout(ctx, 0)
	defer cancel()
	released := s.info("stale_releases")
	if _, err := lock.Acquire(late); err != context.DeadlineExceeded {
		t.Errorf("got %v", err)
	}
	wantEqual(t, s.info("stale_releases"), released) // nothing was asked for, so nothing is given back
	wantEqual(t, s.do("EXISTS", "k"), int64(0))
}

// Cancelled at the moment of the grant, again and again: either a hold or an error, never both or neither.
func TestCancellationAtTheGrant(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	for _, session := range []bool{false, true} {
		lock := turnstile.New(s.pool, "k", turnstile.Options{Wait: patience, Session: session})
		for i := 0; i < 40; i++ {
			s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
			waiting, cancel := context.WithCancel(ctx)
			results := s.waiter(waiting, lock)
			s.awaitInfo(t, "waiters", 1)
			go cancel()
			s.do("LOCK.RELEASE", "k", "other")
			r := <-results
			if r.err == nil {
				wantEqual(t, s.do("LOCK.FENCE", "k"), r.hold.Token)
				want(t, r.hold.Touch())
				want(t, r.hold.Release())
			}
			await(t, "nobody holds it", func() bool { return s.do("EXISTS", "k") == int64(0) && s.info("waiters") == 0 })
		}
	}
}

// When Acquire was cancelled, the server has neither a hold nor a waiter of it. 200 times, because what is at
// stake is which of two connections the server reads first.
func TestCancellationLeavesNothing(t *testing.T) {
	for name, owner := range owners {
		owner := owner
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			for i := 0; i < 200; i++ {
				key := fmt.Sprint("k", i)
				hold, err := turnstile.New(s.pool, key, turnstile.Options{Lease: time.Minute}).Acquire(ctx)
				want(t, err)
				waiting, cancel := context.WithCancel(ctx)
				result := make(chan error)
				go func() {
					_, err := turnstile.New(s.pool, key, turnstile.Options{
						Lease: time.Minute, Wait: time.Minute, Owner: owner(), Also: []string{key + "b"}, Session: i%3 == 0,
					}).Acquire(waiting)
					result <- err
				}()
				s.awaitInfo(t, "waiters", 1)
				cancel()
				if i%2 == 0 {
					err = <-result
					want(t, hold.Release())
				} else {
					want(t, hold.Release())
					err = <-result
				}
				if err != context.Canceled {
					t.Fatalf("got %v", err)
				}
				wantEqual(t, s.info("waiters"), 0)
			}
			wantEqual(t, s.do("DBSIZE"), int64(0))
		})
	}
}

// The same at any moment of the call, on a lock that is free or held.
func TestCancellationAtAnyMomentLeavesNothing(t *testing.T) {
	for name, owner := range owners {
		owner := owner
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			for i := 0; i < 200; i++ {
				key := fmt.Sprint("k", i)
				if i%2 == 0 {
					s.do("LOCK.ACQUIRE", key, "other", "PX", 60000)
				}
				waiting, cancel := context.WithCancel(ctx)
				released := make(chan struct{})
				time.AfterFunc(time.Duration(i%40)*50*time.Microsecond, func() {
					cancel()
					s.do("LOCK.RELEASE", key, "other")
					close(released)
				})
				hold, err := turnstile.New(s.pool, key,
					turnstile.Options{Lease: time.Minute, Wait: time.Minute, Owner: owner()}).Acquire(waiting)
				if err == nil {
					want(t, hold.Release())
				} else if err != context.Canceled {
					t.Fatalf("got %v", err)
				}
				<-released
				wantEqual(t, s.info("waiters"), 0)
			}
			wantEqual(t, s.do("DBSIZE"), int64(0))
		})
	}
}

// The release overtakes the request.
func TestCancellationBeforeTheRequestArrives(t *testing.T) {
	for name, owner := range owners {
		for _, before := range []bool{false, true} {
			owner, before := owner, before
			t.Run(fmt.Sprintf("%s, released before: %v", name, before), func(t *testing.T) {
				t.Parallel()
				s := startServer(t)
				p := startProxy(t, s.address)
				s.do("LOCK.ACQUIRE", "k", "other", "PX", 60000)
				letThrough := p.holdBack("LOCK.ACQUIRE")
				waiting, cancel := context.WithCancel(ctx)
				result := make(chan error)
				go func() {
					_, err := turnstile.New(p.pool, "k",
						turnstile.Options{Lease: time.Minute, Wait: time.Minute, Owner: owner(), Timeout: patience}).Acquire(waiting)
					result <- err
				}()
				await(t, "it asks", func() bool { return p.heldBack() })
				cancel()
				await(t, "a release overtakes the request", func() bool { return s.info("stale_releases") > 0 })
				if before {
					s.do("LOCK.RELEASE", "k", "other")
				}
				letThrough()
				if err := <-result; err != context.Canceled {
					t.Errorf("got %v", err)
				}
				wantEqual(t, s.info("waiters"), 0)
				s.do("LOCK.RELEASE", "k", "other")
				wantEqual(t, s.do("EXISTS", "k"), int64(0))
			})
		}
	}
}

// The server reads the request when nobody waits for the answer any more.
func TestNoAnswerInTimeLeavesNothing(t *testing.T) {
	for name, owner := range owners {
		owner := owner
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			s.signal(syscall.SIGSTOP)
			_, err := turnstile.New(s.pool, "k", turnstile.Options{
				Lease: time.Minute, Wait: 100 * time.Millisecond, Owner: owner(), Timeout: 200 * time.Millisecond,
			}).Acquire(ctx)
			s.signal(syscall.SIGCONT)
			if err == nil || isSentinel(err) {
				t.Errorf("got %v", err)
			}
			await(t, "it was granted", func() bool { return s.info("acquired") == 1 })
			await(t, "it is given up", func() bool { return s.do("EXISTS", "k") == int64(0) })
		})
	}
}

func TestACancelledUpgradeKeepsTheSharedHold(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	other := acquire(t, turnstile.New(s.pool, "k", turnstile.Options{Shared: true}))
	reader := acquire(t, turnstile.New(s.pool, "k", turnstile.Options{Shared: true, Owner: "worker"}))
	for i := 0; i < 20; i++ {
		waiting, cancel := context.WithCancel(ctx)
		result := make(chan error)
		go func() {
			_, err := turnstile.New(s.pool, "k", turnstile.Options{Wait: time.Minute, Owner: "worker"}).Acquire(waiting)
			result <- err
		}()
		s.awaitInfo(t, "waiters", 1)
		cancel()
		if err := <-result; err != context.Canceled {
			t.Errorf("got %v", err)
		}
		s.awaitInfo(t, "waiters", 0)
		want(t, reader.Touch())
	}
	want(t, other.Release())
	_, err := reader.Run("SET", "data", "x") // under the token of before
	want(t, err)
	want(t, reader.Release())
	wantEqual(t, s.do("EXISTS", "k"), int64(0))
}

func TestGuardedWrites(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	hold := acquire(t, turnstile.New(s.pool, "k", turnstile.Options{}))
	reply, err := redis.String(hold.Run("SET", "value", 1))
	want(t, err)
	wantEqual(t, reply, "OK")
	if _, err := hold.Run("LPUSH", "value", 1); err == nil || isSentinel(err) {
		t.Errorf("the write's own error: %v", err)
	}
	want(t, hold.Err())
	s.do("DEL", "k")
	_, err = hold.Run("SET", "value", 2)
	wantError(t, err, turnstile.ErrFenced)
	wantEqual(t, string(s.do("GET", "value").([]byte)), "1")
	wantError(t, hold.Err(), turnstile.ErrLost) // without asking
}

func TestErrorsAreToldApart(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	pool := s.pool
	// Two workers that hold a lock each want the other's.
	of := func(owner, key string) *turnstile.Lock {
		return turnstile.New(pool, key, turnstile.Options{Wait: patience, Owner: owner})
	}
	a, b := acquire(t, of("a", "x")), acquire(t, of("b", "y"))
	waiting := make(chan error)
	go func() {
		_, err := of("a", "y").Acquire(ctx)
		waiting <- err
	}()
	s.awaitInfo(t, "waiters", 1)
	_, err := of("b", "x").Acquire(ctx)
	wantError(t, err, turnstile.ErrDeadlock)

	s.do("CONFIG", "SET", "turnstile.max-waiters", 1)
	_, err = of("c", "x").Acquire(ctx)
	wantError(t, err, turnstile.ErrWaitLimit)

	s.do("CLIENT", "UNBLOCK", s.blockedClient(), "ERROR")
	wantError(t, <-waiting, turnstile.ErrSuperseded)

	// A newer call of the same owner: the older one must not give up what the newer one gets. Not even if it
	// lost its connection, and so does not know what it has.
	go func() {
		_, err := of("a", "y").Acquire(ctx)
		waiting <- err
	}()
	s.awaitInfo(t, "waiters", 1)
	waited := s.info("waits")
	s.do("CLIENT", "KILL", "ID", s.blockedClient())
	await(t, "it stands in line again", func() bool { return s.info("waits") == waited+1 })
	s.do("CONFIG", "SET", "turnstile.max-waiters", 2)
	newer := make(chan *turnstile.Hold)
	go func() {
		hold, _ := of("a", "y").Acquire(ctx)
		newer <- hold
	}()
	wantError(t, <-waiting, turnstile.ErrSuperseded)
	wantEqual(t, s.info("stale_releases"), 0)
	want(t, b.Release())
	if hold := <-newer; hold == nil {
		t.Error("not acquired")
	} else {
		wantEqual(t, s.do("LOCK.FENCE", "y"), hold.Token)
	}

	_, err = turnstile.New(pool, "", turnstile.Options{Lease: time.Hour * 1e6}).Acquire(ctx)
	var other redis.Error
	if !errors.As(err, &other) || isSentinel(err) {
		t.Errorf("a lease that is too long: %v", err)
	}

	s.do("REPLICAOF", "127.0.0.1", 1)
	_, err = of("a", "z").Acquire(ctx)
	wantError(t, err, turnstile.ErrNotPrimary)
	wantError(t, a.Touch(), turnstile.ErrNotPrimary)
	want(t, a.Err()) // a fail-over may still end well
	_, err = a.Run("SET", "value", 1)
	wantError(t, err, turnstile.ErrNotPrimary)

	cluster := startServer(t, "--cluster-enabled", "yes")
	_, err = turnstile.New(cluster.pool, "k", turnstile.Options{}).Acquire(ctx)
	wantError(t, err, turnstile.ErrMoved)
}

func TestModes(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	try := func(key string, o turnstile.Options) (*turnstile.Hold, error) {
		return turnstile.New(s.pool, key, o).TryAcquire(ctx)
	}
	fits := func(key string, o turnstile.Options) *turnstile.Hold {
		t.Helper()
		hold, err := try(key, o)
		want(t, err)
		return hold
	}
	doesNotFit := func(key string, o turnstile.Options) {
		t.Helper()
		_, err := try(key, o)
		wantError(t, err, turnstile.ErrNotAcquired)
	}

	shared := turnstile.Options{Shared: true}
	readers := []*turnstile.Hold{fits("shared", shared), fits("shared", shared)}
	doesNotFit("shared", turnstile.Options{})
	for _, reader := range readers {
		want(t, reader.Release())
	}
	writer := fits("shared", turnstile.Options{})
	doesNotFit("shared", shared)
	want(t, writer.Release())

	heavy := fits("weight", turnstile.Options{Limit: 3, Weight: 2, Tag: "alice"})
	_, err := try("weight", turnstile.Options{Limit: 3, Weight: 2})
	wantError(t, err, turnstile.ErrNotAcquired)
	if text := err.Error(); !strings.Contains(text, "weight is held by alice for another ") || strings.Contains(text, heavy.Owner) {
		t.Error(text)
	}
	fits("weight", turnstile.Options{Limit: 3})
	s.do("LOCK.ACQUIRE", "line", "other", "PX", 60000)
	waiting := s.waiter(ctx, turnstile.New(s.pool, "line", turnstile.Options{Wait: patience}))
	s.awaitInfo(t, "waiters", 1)
	start := time.Now()
	_, err = turnstile.New(s.pool, "line", turnstile.Options{Wait: patience, MaxLine: 1}).Acquire(ctx)
	wantError(t, err, turnstile.ErrNotAcquired)
	wantBetween(t, time.Since(start), 0, slack)
	s.do("LOCK.RELEASE", "line", "other")
	want(t, (<-waiting).hold.Release())

	limit := turnstile.Options{Limit: 2}
	fits("limit", limit)
	second := fits("limit", limit)
	doesNotFit("limit", limit)
	want(t, second.Release())
	fits("limit", limit)

	// Several locks are one hold: all or none, renewed, lost and released together.
	many := turnstile.Options{Lease: 300 * time.Millisecond, Also: []string{"many2", "many3"}}
	three := fits("many1", many)
	doesNotFit("many3", turnstile.Options{})
	time.Sleep(2 * many.Lease)
	for _, key := range []string{"many1", "many2", "many3"} {
		wantEqual(t, s.do("LOCK.FENCE", key), three.Token)
	}
	want(t, three.Release())
	wantEqual(t, s.do("EXISTS", "many1", "many2", "many3"), int64(0))
	three = fits("many1", many)
	s.do("DEL", "many2")
	awaitDone(t, three)
	wantError(t, three.Err(), turnstile.ErrLost)
	wantError(t, three.Release(), turnstile.ErrLost)
	wantEqual(t, s.do("EXISTS", "many1", "many3"), int64(0))

	linger := fits("linger", turnstile.Options{Linger: time.Minute})
	if ttl := s.do("PTTL", "linger").(int64); ttl < 60000 {
		t.Errorf("ends in %d ms", ttl)
	}
	want(t, linger.Release())
}

func TestSession(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	const lease = 900 * time.Millisecond
	lock := turnstile.New(s.pool, "k", turnstile.Options{Lease: lease, Session: true, Wait: time.Second})
	hold := acquire(t, lock)
	time.Sleep(2 * lease)
	want(t, hold.Err())
	wantEqual(t, s.sessions(), 1)
	want(t, hold.Release())
	await(t, "its connection closes", func() bool { return s.sessions() == 0 })

	hold = acquire(t, lock)
	start := time.Now()
	s.do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
	await(t, "the lock is free", func() bool { return s.do("EXISTS", "k") == int64(0) })
	awaitDone(t, hold)
	wantBetween(t, time.Since(start), 0, lease/3+lease/10+slack)
	wantError(t, hold.Release(), turnstile.ErrLost)
}

// Not parallel: it counts all goroutines.
func TestNothingIsLeftRunning(t *testing.T) {
	s := startServer(t)
	before := runtime.NumGoroutine()
	for i := 0; i < 20; i++ {
		lock := turnstile.New(s.pool, "k", turnstile.Options{Wait: time.Second, MaxHold: time.Minute, Session: i%2 == 0})
		want(t, lock.With(ctx, func(context.Context, *turnstile.Hold) error { return nil }))
	}
	await(t, "all goroutines end", func() bool { return runtime.NumGoroutine() <= before })
	touched := s.info("touched") + s.info("stale_touches")
	wantEqual(t, touched, 0)
}

// --- a server ------------------------------------------------------------------------------------

type server struct {
	address string
	pool    *redis.Pool
	process *os.Process

	mu   sync.Mutex
	conn redis.Conn // an operator's
}

func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	module, program := os.Getenv("TURNSTILE_MODULE"), os.Getenv("REDIS_SERVER")
	if module == "" {
		module = "../../../build/turnstile.so"
	}
	if program == "" {
		program = "redis-server"
	}
	module, err := filepath.Abs(module)
	want(t, err)
	folder := t.TempDir()
	for try := 0; try < 20; try++ {
		// Free now, perhaps taken a moment later: then the server ends, and we try another.
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		want(t, err)
		port := listener.Addr().(*net.TCPAddr).Port
		listener.Close()
		if port > 55535 {
			continue // no room for a cluster's second port
		}
		var log bytes.Buffer
		command := exec.Command(program, append([]string{"--bind", "127.0.0.1", "--port", fmt.Sprint(port),
			"--save", "", "--dir", folder, "--loadmodule", module}, args...)...)
		command.Stdout = &log
		command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		want(t, command.Start())
		ended := make(chan struct{})
		go func() { command.Wait(); close(ended) }()
		s := &server{address: fmt.Sprintf("127.0.0.1:%d", port), process: command.Process}
		t.Cleanup(func() { s.process.Kill(); <-ended })
		s.pool = newPool(t, s.address)
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			select {
			case <-ended:
				end = time.Time{}
				continue
			default:
			}
			conn, err := redis.Dial("tcp", s.address, redis.DialReadTimeout(patience))
			if err != nil {
				continue
			}
			info, _ := redis.String(conn.Do("INFO", "server"))
			if strings.Contains(info, fmt.Sprintf("process_id:%d\r\n", s.process.Pid)) {
				s.conn = conn
				t.Cleanup(func() { conn.Close() })
				return s
			}
			conn.Close()
		}
		s.process.Kill()
		<-ended
		t.Log(log.String())
	}
	t.Fatal("the server does not start")
	return nil
}

func newPool(t *testing.T, address string) *redis.Pool {
	pool := &redis.Pool{MaxIdle: 4, DialContext: func(ctx context.Context) (redis.Conn, error) {
		return redis.DialContext(ctx, "tcp", address, redis.DialReadTimeout(200*time.Millisecond))
	}}
	t.Cleanup(func() { pool.Close() })
	return pool
}

func (s *server) do(command string, args ...interface{}) interface{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	reply, err := s.conn.Do(command, args...)
	if err != nil {
		panic(err)
	}
	return reply
}

// info is a field of INFO turnstile.
func (s *server) info(field string) int64 {
	text, _ := redis.String(s.do("INFO", "turnstile"), nil)
	var n int64 = -1
	for _, line := range strings.Split(text, "\r\n") {
		if strings.HasPrefix(line, "turnstile_"+field+":") {
			fmt.Sscan(line[strings.Index(line, ":")+1:], &n)
		}
	}
	return n
}

func (s *server) awaitInfo(t *testing.T, field string, value int64) {
	t.Helper()
	await(t, fmt.Sprintf("%s:%d", field, value), func() bool { return s.info(field) == value })
}

// clients counts the connections of which CLIENT LIST says this.
func (s *server) clients(what string) int {
	text, _ := redis.String(s.do("CLIENT", "LIST"), nil)
	return strings.Count(strings.ToLower(text), " "+what)
}

// sessions counts the connections that acquired a lock and did nothing since.
func (s *server) sessions() int { return s.clients("cmd=lock.acquire ") }

// connections is how many there have ever been.
func (s *server) connections() (n int64) {
	text, _ := redis.String(s.do("INFO", "stats"), nil)
	fmt.Sscanf(text[strings.Index(text, "total_connections_received:"):], "total_connections_received:%d", &n)
	return n
}

type result struct {
	hold *turnstile.Hold
	err  error
}

// waiter acquires the lock in a goroutine.
func (s *server) waiter(ctx context.Context, lock *turnstile.Lock) <-chan result {
	results := make(chan result, 1)
	go func() {
		hold, err := lock.Acquire(ctx)
		results <- result{hold, err}
	}()
	return results
}

// blockedClient is the id of a client that waits.
func (s *server) blockedClient() (id int64) {
	text, _ := redis.String(s.do("CLIENT", "LIST"), nil)
	for _, line := range strings.Split(text, "\n") {
		if strings.Contains(line, " flags=b ") {
			fmt.Sscanf(line, "id=%d", &id)
		}
	}
	return id
}

func (s *server) signal(signal syscall.Signal) { s.process.Signal(signal) }

// --- a proxy that loses replies ------------------------------------------------------------------

type proxy struct {
	pool *redis.Pool
	hang bool // keep silent instead of closing

	mu    sync.Mutex
	what  string
	left  int
	count int64

	slow    string
	through chan struct{} // closed when what is slow may go on
	isSlow  bool
}

func startProxy(t *testing.T, address string) *proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	want(t, err)
	p := &proxy{pool: newPool(t, listener.Addr().String())}
	var all sync.WaitGroup
	all.Add(1)
	t.Cleanup(func() { p.pool.Close(); turnstile.CloseIdle(p.pool); listener.Close(); all.Wait() })
	go func() {
		defer all.Done()
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			all.Add(1)
			go func() {
				defer all.Done()
				p.forward(client, address)
			}()
		}
	}()
	return p
}

// lose loses the replies to the next n requests that contain what.
func (p *proxy) lose(what string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.what, p.left = what, n
}

// holdBack keeps the next request that contains what, and its connection, from the server until the function
// that it returns is called.
func (p *proxy) holdBack(what string) (letThrough func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	through := make(chan struct{})
	p.slow, p.through = what, through
	return func() { close(through) }
}

func (p *proxy) heldBack() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.isSlow
}

func (p *proxy) holdsBack(request []byte) chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.slow == "" || !bytes.Contains(request, []byte(p.slow)) {
		return nil
	}
	p.slow, p.isSlow = "", true
	return p.through
}

func (p *proxy) lost() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

func (p *proxy) loses(request []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 || !bytes.Contains(request, []byte(p.what)) {
		return false
	}
	p.left--
	p.count++
	return true
}

// forward takes turns: a request, as our small ones come in one piece, then its reply.
func (p *proxy) forward(client net.Conn, address string) {
	defer client.Close()
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer server.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := client.Read(buffer)
		if err != nil {
			return
		}
		if through := p.holdsBack(buffer[:n]); through != nil {
			<-through
		}
		loses := p.loses(buffer[:n])
		server.Write(buffer[:n])
		if n, err = server.Read(buffer); err != nil {
			return
		}
		if loses {
			if p.hang {
				io.Copy(io.Discard, client) // until it gives up
			}
			return
		}
		client.Write(buffer[:n])
	}
}

// --- what is wanted ------------------------------------------------------------------------------

func acquire(t *testing.T, lock *turnstile.Lock) *turnstile.Hold {
	t.Helper()
	hold, err := lock.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hold.Release() })
	return hold
}

func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

func awaitDone(t *testing.T, hold *turnstile.Hold) {
	t.Helper()
	select {
	case <-hold.Done():
	case <-time.After(patience):
		t.Fatal("the hold goes on")
	}
}

func want(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantError: this one of ours, and no other.
func wantError(t *testing.T, err, wanted error) {
	t.Helper()
	for _, sentinel := range sentinels {
		if errors.Is(err, sentinel) != (sentinel == wanted) {
			t.Fatalf("wanted %v, got %v", wanted, err)
		}
	}
}

func isSentinel(err error) bool {
	for _, sentinel := range sentinels {
		if errors.Is(err, sentinel) {
			return true
		}
	}
	return false
}

func wantEqual(t *testing.T, got, wanted interface{}) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(wanted) {
		t.Fatalf("wanted %v, got %v", wanted, got)
	}
}

func wantBetween(t *testing.T, d, least, most time.Duration) {
	t.Helper()
	if d < least || d > most {
		t.Errorf("took %v, wanted %v to %v", d, least, most)
	}
}
