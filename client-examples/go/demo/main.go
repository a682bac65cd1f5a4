// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

// Demo shows what package turnstile can do, step by step, against a server with the module:
//
//	go run ./demo [host:port]
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/gomodule/redigo/redis"

	"example.org/turnstile-go/turnstile"
)

func main() {
	log.SetFlags(0)
	address := "127.0.0.1:6379"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	pool := &redis.Pool{
		MaxIdle: 4,
		DialContext: func(ctx context.Context) (redis.Conn, error) {
			return redis.DialContext(ctx, "tcp", address,
				redis.DialConnectTimeout(time.Second), redis.DialReadTimeout(time.Second))
		},
	}
	defer pool.Close()
	ctx := context.Background()

	table := turnstile.New(pool, "demo:table:12", turnstile.Options{Lease: 2 * time.Second, Wait: 3 * time.Second})

	fmt.Println("1. With: the work gets the token, and a write that only the holder can make.")
	must(table.With(ctx, func(ctx context.Context, h *turnstile.Hold) error {
		fmt.Println("   token", h.Token)
		_, err := h.Run("SET", "demo:table:12:guest", "alice")
		return err
	}))

	fmt.Println("2. Acquire, touch, release. Meanwhile a second one is refused.")
	first, err := table.Acquire(ctx)
	must(err)
	defer first.Release() // does nothing after the Release below
	must(first.Touch())
	if _, err := table.TryAcquire(ctx); !errors.Is(err, turnstile.ErrNotAcquired) {
		log.Fatalf("two at one table: %v", err)
	}

	fmt.Println("3. Another one waits in line and gets the lock at the moment of the release.")
	came := make(chan error)
	go func() {
		came <- table.With(ctx, func(_ context.Context, h *turnstile.Hold) error {
			if h.Token <= first.Token {
				return errors.New("the token did not rise")
			}
			return nil
		})
	}()
	must(first.Release())
	must(<-came)

	fmt.Println("4. Work that takes longer than its lease: it is renewed in the background.")
	long := turnstile.New(pool, "demo:report", turnstile.Options{Lease: 300 * time.Millisecond})
	must(long.With(ctx, func(ctx context.Context, h *turnstile.Hold) error {
		return work(ctx, time.Second)
	}))

	fmt.Println("5. An operator removes the lock: the work is told.")
	err = long.With(ctx, func(ctx context.Context, h *turnstile.Hold) error {
		do(pool, "DEL", "demo:report")
		return work(ctx, time.Minute)
	})
	if !errors.Is(err, turnstile.ErrLost) {
		log.Fatalf("nobody told the work: %v", err)
	}
	fmt.Println("  ", err)

	fmt.Println("6. A late write is refused, whatever the writer believes.")
	late, err := long.Acquire(ctx)
	must(err)
	do(pool, "DEL", "demo:report")
	if _, err := late.Run("SET", "demo:report:page", "stale"); !errors.Is(err, turnstile.ErrFenced) {
		log.Fatalf("a stale write went through: %v", err)
	}
	late.Release()

	fmt.Println("7. A job that may not go on for ever.")
	bounded := turnstile.New(pool, "demo:report",
		turnstile.Options{Lease: 300 * time.Millisecond, MaxHold: 500 * time.Millisecond})
	err = bounded.With(ctx, func(ctx context.Context, h *turnstile.Hold) error { return work(ctx, time.Minute) })
	if !errors.Is(err, turnstile.ErrMaxHold) {
		log.Fatalf("it went on: %v", err)
	}

	fmt.Println("8. Readers together; at most two at the printer; two tables at once; a session.")
	together(2, turnstile.New(pool, "demo:menu", turnstile.Options{Shared: true}))
	together(2, turnstile.New(pool, "demo:printer", turnstile.Options{Limit: 2}))
	together(1, turnstile.New(pool, "demo:table:{a}13", turnstile.Options{Also: []string{"demo:table:{a}14"}}))
	together(1, turnstile.New(pool, "demo:leader", turnstile.Options{Session: true}))

	do(pool, "DEL", "demo:table:12:guest")
	fmt.Println("done")
}

// together holds the lock n times at once.
func together(n int, lock *turnstile.Lock) {
	var inside, done sync.WaitGroup
	inside.Add(n)
	for i := 0; i < n; i++ {
		done.Add(1)
		go func() {
			defer done.Done()
			must(lock.With(context.Background(), func(context.Context, *turnstile.Hold) error {
				inside.Done()
				inside.Wait()
				return nil
			}))
		}()
	}
	done.Wait()
}

// work stands for something that takes a while and looks at its context.
func work(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func do(pool *redis.Pool, command string, args ...interface{}) {
	conn := pool.Get()
	defer conn.Close()
	_, err := conn.Do(command, args...)
	must(err)
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
