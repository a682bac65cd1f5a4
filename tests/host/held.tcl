# Read by a copy of the server's suite, at the end of tests/support/util.tcl (tests/host/run adds the
# line). Each server that a test file works with gets, as soon as it accepts connections, something
# held and a client that waits, both in the database that the tests use. HOST_HELD says what:
#
#   lock   a lock that is held, and a client that waits for it
#   key    the same without locks: a key that expires, and a client that waits for a list
#
# The commands of the suite are not defined yet when this is read. They are when it reads the first
# file of tests.

rename source host_source
proc source {path} {
    if {[llength [info procs ::reconnect]] && ![llength [info procs ::host_reconnect]]} {
        rename ::reconnect ::host_reconnect
        proc ::reconnect {args} {
            host_reconnect {*}$args
            set level 0
            if {[string is integer -strict [lindex $args 0]]} {set level [lindex $args 0]}
            # A server that asks for a password, or is part of a cluster, stays as it is.
            if {![catch {host_hold [srv $level host] [srv $level port]}]} {puts {[held]: one}}
        }
    }
    uplevel 1 [list host_source $path]
}

proc host_hold {host port} {
    set client [redis $host $port 0 $::tls]
    $client select 9
    if {$::env(HOST_HELD) eq {lock}} {
        $client lock.acquire host:held holder px 600000
        set wait {lock.acquire host:held waiter px 1000 wait 600000}
    } else {
        $client set host:held holder px 600000
        set wait {blpop host:list 600}
    }
    $client close
    set waiter [redis $host $port 1 $::tls]
    $waiter select 9
    $waiter read
    $waiter {*}$wait
}
