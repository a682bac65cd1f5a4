/* SPDX-License-Identifier: BSD-3-Clause */
/* Copyright (c) 2026 The Turnstile authors */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>

static redisContext *open_connection(const char *host, int port) {
  struct timeval limit = {7, 0}; /* WAIT and a margin */
  redisContext *c = redisConnectWithTimeout(host, port, (struct timeval){2, 0});
  if (!c || c->err || redisSetTimeout(c, limit) != REDIS_OK) exit(2);
  return c;
}

int main(int argc, char **argv) { /* hiredis [host port] */
  const char *host = argc > 1 ? argv[1] : "127.0.0.1";
  int port = argc > 2 ? atoi(argv[2]) : 6379;
  char owner[37] = ""; /* a new one for each acquisition */
  FILE *ids = fopen("/proc/sys/kernel/random/uuid", "r");
  if (!ids || !fgets(owner, sizeof owner, ids)) return 2;
  fclose(ids);

  redisContext *c = open_connection(host, port);
  redisReply *reply = redisCommand(c, "LOCK.ACQUIRE table:12 %s PX 10000 WAIT 5000", owner);
  if (!reply) { /* no answer: the lock may have been granted anyway */
    fprintf(stderr, "%s\n", c->errstr);
    redisFree(c); /* of no use after an error */
    redisCommand(open_connection(host, port), "LOCK.RELEASE table:12 %s", owner);
    return 1;
  }
  if (reply->type != REDIS_REPLY_INTEGER) {
    fprintf(stderr, "%s\n", reply->type == REDIS_REPLY_ERROR ? reply->str : "not acquired");
    return 1;
  }
  long long token = reply->integer;
  printf("token %lld\n", token);
  freeReplyObject(reply);
  /* The work. This write happens only while the token holds the lock. */
  reply = redisCommand(c, "LOCK.FENCE table:12 %lld THEN SET {table:12}:guest alice EX 60", token);
  int failed = !reply || reply->type == REDIS_REPLY_ERROR;
  if (reply) freeReplyObject(reply);
  if (c->err || !(reply = redisCommand(c, "LOCK.RELEASE table:12 %s", owner))) return 1;
  printf("released %lld\n", reply->integer);
  freeReplyObject(reply);
  redisFree(c);
  return failed;
}
