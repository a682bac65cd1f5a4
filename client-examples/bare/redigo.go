// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
package main

import (
	"crypto/rand"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/gomodule/redigo/redis"
)

func main() {
	url := os.Getenv("REDIS_URL")
	if url == "" {
		url = "redis://127.0.0.1:6379"
	}
	pool := &redis.Pool{Dial: func() (redis.Conn, error) {
		return redis.DialURL(url, redis.DialReadTimeout(7*time.Second)) // WAIT and a margin
	}}
	do := func(command string, args ...interface{}) (interface{}, error) {
		connection := pool.Get() // a call that waits has this connection for itself
		defer connection.Close()
		return connection.Do(command, args...)
	}
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		log.Fatal(err)
	}
	owner := fmt.Sprintf("%x", id) // a new one for each acquisition
	token, err := redis.Int64(do("LOCK.ACQUIRE", "table:12", owner, "PX", 10000, "WAIT", 5000))
	if err == redis.ErrNil {
		log.Fatal("not acquired")
	} else if err != nil { // the lock may have been granted anyway
		do("LOCK.RELEASE", "table:12", owner)
		log.Fatal(err)
	}
	fmt.Println("token", token)
	// The work. This write happens only while the token holds the lock.
	_, failed := do("LOCK.FENCE", "table:12", token, "THEN", "SET", "{table:12}:guest", "alice", "EX", 60)
	released, err := redis.Int(do("LOCK.RELEASE", "table:12", owner))
	fmt.Println("released", released)
	if failed != nil || err != nil {
		log.Fatal(failed, err)
	}
}
