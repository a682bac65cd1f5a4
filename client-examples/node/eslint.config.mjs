// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

import js from '@eslint/js';

export default [
  js.configs.recommended,
  {
    languageOptions: {
      globals: Object.fromEntries(
        ['AbortController', 'AbortSignal', 'console', 'performance', 'process', 'setTimeout', 'clearTimeout', 'Buffer', 'URL'].map(
          (name) => [name, 'readonly'],
        ),
      ),
    },
    rules: { eqeqeq: 'error', 'no-var': 'error', 'prefer-const': ['error', { destructuring: 'all' }] },
  },
];
