"""What tests/host/run has to know about the server's suite. README.md says how it was found."""

# For CI, those that take longest first.
QUICK = """
integration/aof
unit/aofrw
unit/dump
integration/shutdown
unit/scripting
integration/rdb
unit/expire
integration/replication-3
unit/type/list
unit/type/string
unit/functions
unit/introspection
unit/introspection-2
unit/moduleapi/blockonkeys
unit/scan
unit/other
unit/multi
unit/wait
unit/moduleapi/hooks
unit/moduleapi/blockedclient
unit/moduleapi/datatype
unit/moduleapi/eventloop
unit/moduleapi/keyspace_events
unit/moduleapi/timer
unit/networking
unit/querybuf
unit/shutdown
unit/pause
unit/acl
unit/acl-v2
unit/auth
unit/info
unit/info-command
unit/keyspace
unit/lazyfree
unit/protocol
unit/pubsub
unit/pubsubshard
unit/quit
unit/tracking
unit/type/hash
unit/type/incr
""".split()

# Files that do the same while a key is held and a client waits in the tests' database: they neither
# flush it nor count keys or clients.
TOLERANT = """
integration/convert-ziplist-hash-on-load
integration/convert-ziplist-zset-on-load
integration/convert-zipmap-hash-on-load
integration/logging
integration/psync2
unit/acl-v2
unit/auth
unit/bitfield
unit/geo
unit/hyperloglog
unit/info
unit/info-command
unit/limits
unit/moduleapi/aclcheck
unit/moduleapi/auth
unit/moduleapi/blockedclient
unit/moduleapi/cmdintrospection
unit/moduleapi/commandfilter
unit/moduleapi/datatype
unit/moduleapi/eventloop
unit/moduleapi/fork
unit/moduleapi/getkeys
unit/moduleapi/hash
unit/moduleapi/infotest
unit/moduleapi/keyspace_events
unit/moduleapi/keyspecs
unit/moduleapi/list
unit/moduleapi/mallocsize
unit/moduleapi/publish
unit/moduleapi/reply
unit/moduleapi/subcommands
unit/moduleapi/test_lazyfree
unit/moduleapi/timer
unit/moduleapi/usercall
unit/moduleapi/zset
unit/networking
unit/oom-score-adj
unit/pendingquerybuf
unit/pubsubshard
unit/querybuf
unit/quit
unit/replybufsize
unit/shutdown
unit/type/hash
unit/type/incr
unit/type/list-2
unit/type/list-3
unit/violations
unit/wait
""".split()

# Files that are not run, and why.
LEFT_OUT = {
    "unit/tls": "needs certificates, and runs only with --tls",
}

FIRST_OF_LIST = "takes the first entry of MODULE LIST for its own module; the order is random"
AFTER_IT = "follows from a test before it that failed and left its module loaded"

# What any module changes: (file, test) -> why. Whether such a test passes may be a matter of chance,
# so here Turnstile may differ from the module that does nothing.
ANY_MODULE = {
    ("unit/moduleapi/infra", "modules config rewrite"): "expects no other module in MODULE LIST",
    ("unit/moduleapi/moduleconfigs", "Config get commands work"): FIRST_OF_LIST,
    ("unit/moduleapi/moduleconfigs", "test loadex functionality"): FIRST_OF_LIST,
    ("unit/moduleapi/moduleconfigs", "test config rewrite with dynamic load"): FIRST_OF_LIST,
    ("unit/moduleapi/moduleconfigs", "test multiple modules with configs"): AFTER_IT,
    (
        "unit/moduleapi/moduleconfigs",
        "test 1.module load 2.config rewrite 3.module unload 4.config rewrite works",
    ): AFTER_IT,
}

# What Turnstile changes and may: (variant, file, test) -> why.
EXPECTED = {}
