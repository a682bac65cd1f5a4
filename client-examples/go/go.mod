// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

module example.org/turnstile-go // a name that nobody can publish under: see turnstile/turnstile.go

go 1.19

require github.com/gomodule/redigo v1.8.3
