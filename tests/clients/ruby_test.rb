#!/usr/bin/ruby
# frozen_string_literal: true

# tests/clients/ruby_test.rb [minitest options]
#
# Tests client-examples/ruby/turnstile.rb on servers of its own. The module is build/turnstile.so, or what TURNSTILE_MODULE
# names; the server is redis-server, or what REDIS_SERVER names. Needs Debian's packages ruby, ruby-redis and
# ruby-minitest; another redis-rb: ruby -I its/lib -I redis-client's/lib tests/clients/ruby_test.rb

require "fileutils"
require "minitest/autorun"
require "set"
require "socket"
require "timeout"
require "tmpdir"

require_relative "../../client-examples/ruby/turnstile"

PATIENCE = 10  # for what must happen; longer means that it will not
SLACK = 1.5    # what a busy machine may add to a delay
Cut = Class.new(StandardError)

def await(what)
  ends = Turnstile.now + PATIENCE
  until (met = yield)
    raise "waited in vain: #{what}" if Turnstile.now > ends

    sleep 0.005
  end
  met
end

class Server
  attr_reader :port, :pid, :operator

  def initialize(*options)
    @folder = Dir.mktmpdir("ruby_test")
    file = File.expand_path(ENV.fetch("TURNSTILE_MODULE", File.join(__dir__, "../../build/turnstile.so")))
    20.times do
      # Free now, perhaps taken a moment later: then the server ends, and another is tried.
      @port = rand(20_000..29_999)
      @pid = spawn(ENV.fetch("REDIS_SERVER", "redis-server"), "--bind", "127.0.0.1", "--port", @port.to_s, "--save", "",
                   "--dir", @folder, "--loadmodule", file, *options, %i[out err] => ["#{@folder}/log", "a"])
      ends = Turnstile.now + PATIENCE
      while Turnstile.now < ends && Process.wait(@pid, Process::WNOHANG).nil?
        begin
          @operator = connect(read_timeout: PATIENCE)
          return if @operator.info("server")["process_id"].to_i == @pid
        rescue Redis::BaseError
          sleep 0.01
        end
      end
      @pid = nil
    end
    raise "the server does not start: #{File.read("#{@folder}/log")}"
  end

  def stop
    return unless @pid

    Process.kill(:KILL, @pid)
    Process.wait(@pid)
    @pid = nil
  end

  def remove
    stop
    FileUtils.rm_rf(@folder)
  end

  def signal(name)
    Process.kill(name, @pid)
  end

  def connect(port: @port, read_timeout: 0.4, **options)
    Redis.new(host: "127.0.0.1", port: port, read_timeout: read_timeout, **options)
  end

  def do(*command)
    @operator.call(*command)
  end

  # A field of INFO turnstile.
  def info(field)
    Integer(self.do("INFO", "turnstile")[/^turnstile_#{field}:(\d+)/, 1])
  end

  def await_info(field, value)
    await("#{field}:#{value}, not #{info(field)}") { info(field) == value }
  end

  def connections
    @operator.info("stats")["total_connections_received"].to_i
  end

  def clients
    @operator.info("clients")["connected_clients"].to_i
  end

  def blocked_client
    self.do("CLIENT", "LIST")[/^id=(\d+) .* flags=b /, 1]
  end

  def free?(key)
    self.do("EXISTS", key).zero? && info("waiters").zero?
  end
end

# Forwards; of the first `times` requests that contain `what` the server's reply gets lost with the connection.
class Proxy
  attr_reader :port

  def initialize(server, what, times)
    @listener = TCPServer.new("127.0.0.1", 0)
    @port = @listener.addr[1]
    @lock = Mutex.new
    @threads = [Thread.new do
      loop do
        client = @listener.accept
        @threads << Thread.new { forward(client, TCPSocket.new("127.0.0.1", server.port), what) }
      end
    end]
    @left = times
  end

  def stop
    @threads.each(&:kill).each(&:join)
    @listener.close
  end

  private

  def forward(client, server, what)
    loop do
      ready, = IO.select([client, server])
      if ready.include?(client)
        request = client.readpartial(65_536)
        server.write(request)
        if @lock.synchronize { request.include?(what) && @left.positive? && (@left -= 1) }
          server.readpartial(65_536)
          break
        end
      else
        client.write(server.readpartial(65_536))
      end
    end
  rescue SystemCallError, IOError
    nil
  ensure
    client.close
    server.close
  end
end

class TurnstileTest < Minitest::Test
  def setup
    @server = Server.new
    @redis = @server.connect
    @proxies = []
  end

  def teardown
    @proxies.each(&:stop)
    @server.remove
  end

  def proxy(what, times)
    @proxies << Proxy.new(@server, what, times)
    @server.connect(port: @proxies.last.port)
  end

  def acquire(key = "k", redis: @redis, **options)
    Turnstile.acquire(redis, key, **options)
  end

  # Another thread that tries to get the lock; its value is the hold or the error.
  def waiting(key = "k", **options)
    Thread.new do
      acquire(key, wait: PATIENCE, **options)
    rescue Exception => error # rubocop:disable Lint/RescueException
      error
    end
  end

  def others_hold(key = "k", milliseconds = 60_000)
    @server.do("LOCK.ACQUIRE", key, "other", "PX", milliseconds)
  end

  def other_releases(key = "k")
    @server.do("LOCK.RELEASE", key, "other")
  end

  def took
    start = Turnstile.now
    yield
    Turnstile.now - start
  end

  def test_one_holder_at_a_time
    first = acquire(tag: "alice")
    assert_equal @server.do("LOCK.FENCE", "k"), first.token
    error = assert_raises(Turnstile::NotAcquired) { acquire }
    assert_match(/\Alock k is held by alice for another (9\d{3}|10000) ms; 0 wait\z/, error.message)
    first.release
    first.release # once more does nothing
    assert_raises(Turnstile::Lost) { first.check! }
    assert_raises(Turnstile::Lost) { first.touch }
    assert_equal 0, @server.info("stale_touches") + @server.info("stale_releases")
    second = acquire
    assert_operator second.token, :>, first.token
    refute_equal first.owner, second.owner
    second.check!
    refute second.lost?
    second.release
    assert @server.free?("k")
  end

  def test_a_free_lock_needs_no_other_connection_and_one_thread
    Turnstile.lock(@redis, "k") { nil }
    before = @server.connections
    threads = Thread.list.size
    30.times { |i| Turnstile.lock(@redis, "k#{i}", wait: 1) { |hold| hold.run("INCR", "n") } }
    holds = Array.new(30) { |i| acquire("k#{i}") }
    assert_raises(Turnstile::NotAcquired) { acquire("k1") }
    holds.each(&:release)
    assert_equal "30", @server.do("GET", "n")
    assert_equal before, @server.connections
    assert_equal threads, Thread.list.size
  end

  def test_waiting_in_line
    others_hold
    took = took { assert_raises(Turnstile::NotAcquired) { acquire(wait: 0.7) } } # more than the read time-out
    assert_includes 0.69..0.7 + SLACK, took
    assert_equal 1, @server.info("waits")
    token = @server.do("LOCK.FENCE", "k")
    other = waiting
    @server.await_info("waiters", 1)
    assert_equal "PONG", @redis.ping # waiting does not keep the connection busy
    other_releases
    assert_operator other.value.token, :>, token
    other.value.release

    others_hold
    other = waiting
    @server.await_info("waiters", 1)
    assert_includes 0..SLACK, took { assert_raises(Turnstile::NotAcquired) { acquire(wait: 5, max_line: 1) } }
    other_releases
    other.value.release
    assert @server.free?("k")
  end

  def test_waiting_connections_are_used_again
    before = @server.connections
    15.times do |i|
      others_hold
      other = waiting
      @server.await_info("waiters", 1)
      other_releases
      other.value.release
      others_hold
      assert_raises(Turnstile::NotAcquired) { acquire(wait: 0.01) }
      other_releases
      assert_equal before + 2, @server.connections, "round #{i}: one for @redis, one that waits"
    end

    # Many at a time: as many connections, but only a few are kept.
    others_hold
    others = Array.new(12) { waiting }
    @server.await_info("waiters", 12)
    other_releases
    seen = Set.new
    await("all had it") do
      others.each { |thread| thread.value.release if !thread.alive? && seen.add?(thread) }
      seen.size == 12
    end
    await("four are kept") { @server.clients == 2 + 4 } # and the operator's and @redis
    assert @server.free?("k")
  end

  def test_a_long_wait_for_a_short_lease
    others_hold("k", 600)
    hold = acquire(lease: 0.3, wait: PATIENCE)
    sleep 0.5
    hold.check!
    hold.release
    assert_equal 1, @server.info("reacquired")
  end

  def test_the_block_form_always_releases
    assert_equal :result, (Turnstile.lock(@redis, "k") do |hold|
      assert_equal @server.do("LOCK.FENCE", "k"), hold.token
      :result
    end)
    assert @server.free?("k")
    assert_raises(ArgumentError) { Turnstile.lock(@redis, "k") { raise ArgumentError } }
    assert @server.free?("k")
    assert_equal :thrown, catch(:out) { Turnstile.lock(@redis, "k") { throw :out, :thrown } }
    assert @server.free?("k")
    [1].each { Turnstile.lock(@redis, "k") { break } }
    assert @server.free?("k")
    # The release fails too: what the block raises comes first. Without that, the loss is told, also on the way out of a
    # rescue and by break.
    assert_raises(ArgumentError) { Turnstile.lock(@redis, "k") { @server.do("DEL", "k") && raise(ArgumentError) } }
    assert_raises(Turnstile::Lost) { Turnstile.lock(@redis, "k") { @server.do("DEL", "k") } }
    assert_raises(Turnstile::Lost) { [1].each { Turnstile.lock(@redis, "k") { break @server.do("DEL", "k") } } }
    begin
      raise ArgumentError
    rescue ArgumentError
      assert_raises(Turnstile::Lost) { Turnstile.lock(@redis, "k") { @server.do("DEL", "k") } }
    end
  end

  def test_renewal_of_many_holds
    acquire("first").release # what comes with the first use
    before = @server.connections
    threads = Thread.list.size
    holds = Array.new(40) { |i| acquire("k#{i}", lease: 0.6) }
    ends = Turnstile.now + 2
    while Turnstile.now < ends
      holds.each_with_index { |hold, i| assert_equal hold.token, @server.do("LOCK.FENCE", "k#{i}") }
      holds.each(&:check!)
      sleep 0.05
    end
    assert_equal threads, Thread.list.size
    assert_equal before + 1, @server.connections
    assert_includes 40 * 6..40 * 12, @server.info("touched")
    holds.each(&:release)
    assert_equal 0, @server.do("DBSIZE")
    touched = @server.info("touched")
    sleep 0.5
    assert_equal touched, @server.info("touched") + @server.info("stale_touches"), "nobody renews any more"
  end

  def test_a_short_lease_beside_a_long_one
    long = acquire("long", lease: 60)
    await("the renewal sleeps") { Thread.list.any? { |t| t.name == "turnstile renewal" && t.status == "sleep" } }
    short = acquire("short", lease: 0.3)
    sleep 0.8
    short.check!
    [long, short].each(&:release)
  end

  def test_renewal_while_the_connection_is_busy
    hold = acquire(lease: 0.6)
    busy = @server.connect(read_timeout: 5)
    second = acquire("l", redis: busy, lease: 0.6)
    busy.blpop("none", timeout: 1.5)
    [hold, second].each(&:check!)
    [hold, second].each(&:release)
  end

  def test_a_refused_renewal_does_not_keep_others_back
    holds = Array.new(3) { |i| acquire("k#{i}", lease: 1.2) }
    @server.signal(:STOP) # while the first one is renewed the others come due: from then on they go together
    sleep 0.6
    @server.signal(:CONT)
    touched = @server.info("touched")
    await("all are renewed") { @server.info("touched") >= touched + 3 }
    @server.do("ACL", "SETUSER", "default", "resetkeys", "~k0", "~k2", "~other")
    await("one is lost") { holds[1].lost? }
    assert_raises(Turnstile::Lost) { holds[1].check! }
    sleep 1.2
    [holds[0], holds[2]].each(&:check!)
    @server.do("ACL", "SETUSER", "default", "allkeys")
    [holds[0], holds[2]].each(&:release)
  end

  def test_touch
    hold = acquire(lease: 60)
    sleep 0.1
    before = @server.do("PEXPIRETIME", "k")
    hold.touch
    assert_operator @server.do("PEXPIRETIME", "k"), :>=, before + 90
    @server.do("DEL", "k")
    assert_raises(Turnstile::Lost) { hold.touch }
    assert_raises(Turnstile::Lost) { hold.check! }
    assert_raises(Turnstile::Lost) { hold.release }
  end

  def test_a_loss_is_noticed
    hold = acquire(lease: 6)
    @server.do("DEL", "k")
    assert_includes 0..2 + SLACK, took { await("it is lost") { hold.lost? } }

    hold = acquire(lease: 0.9)
    @server.signal(:STOP)
    assert_includes 0.85..0.9 + SLACK, took { await("it is lost") { hold.lost? } }
    @server.signal(:CONT)
    await("on the server too") { @server.free?("k") }

    hold = acquire(lease: 1.5)
    @server.signal(:STOP)
    sleep 0.9
    @server.signal(:CONT)
    sleep 1.5
    hold.check! # a short silence costs nothing
    hold.release
  end

  def test_a_silent_server_does_not_keep_others_back
    other = Server.new
    theirs = acquire("theirs", redis: other.connect, lease: 0.6)
    ours = acquire(lease: 3)
    other.signal(:STOP)
    sleep 3.2
    ours.check!
    assert theirs.lost?
    ours.release
  ensure
    other.remove
  end

  def test_the_maximum
    hold = acquire(lease: 0.3, max_hold: 0.8)
    assert_includes 0.75..0.8 + SLACK, took { await("it is over") { hold.lost? } }
    assert_raises(Turnstile::MaxHold) { hold.check! }
    await("nobody renews it") { @server.free?("k") }
    assert_raises(Turnstile::Lost) { hold.release }
    Turnstile.lock(@redis, "k", lease: 5, max_hold: 0.1) { sleep 0.15 } # in time for a clean release
    assert @server.free?("k")
  end

  def test_writes_under_the_fence
    hold = acquire
    assert_equal "OK", hold.run("SET", "value", 1)
    assert_raises(Turnstile::Error) { hold.run("LPUSH", "value", 1) }
    hold.check!
    @server.do("DEL", "k")
    assert_raises(Turnstile::Fenced) { hold.run("SET", "value", 2) }
    assert_equal "1", @server.do("GET", "value")
    assert_raises(Turnstile::Lost) { hold.check! } # without asking
  end

  def test_modes
    readers = Array.new(2) { acquire("shared", shared: true) }
    assert_raises(Turnstile::NotAcquired) { acquire("shared") }
    readers.each(&:release)
    acquire("shared").release

    heavy = acquire("limit", limit: 3, weight: 2)
    acquire("limit", limit: 3)
    assert_raises(Turnstile::NotAcquired) { acquire("limit", limit: 3) }
    heavy.release
    acquire("limit", limit: 3)

    three = acquire("a", also: %w[b c], lease: 0.3)
    error = assert_raises(Turnstile::NotAcquired) { acquire("free", also: %w[c]) }
    assert_match(/lock c is held by another owner/, error.message)
    sleep 0.6
    assert_equal [three.token] * 3, %w[a b c].map { |key| @server.do("LOCK.FENCE", key) }
    @server.do("DEL", "b")
    await("it is lost") { three.lost? }
    assert_raises(Turnstile::Lost) { three.release }
    assert_equal 0, @server.do("EXISTS", "a", "b", "c")

    acquire("linger", linger: 60)
    assert_operator @server.do("PTTL", "linger"), :>, 60_000
  end

  def test_session
    session = lambda do
      info = @server.do("LOCK.INFO", "k").to_a.flatten.flat_map { |part| part.is_a?(Hash) ? part.to_a.flatten : part }
      info[info.index("client-id") + 1].to_s
    end
    hold = acquire(session: true, lease: 0.6)
    id = session.call
    sleep 0.8
    hold.check!
    hold.release
    await("its connection closes") { @server.do("CLIENT", "LIST", "ID", id).empty? }
    hold = acquire(session: true, lease: 60)
    @server.do("CLIENT", "KILL", "ID", session.call)
    await("it ends with its connection") { @server.free?("k") }
    assert_raises(Turnstile::Lost) { hold.release }
    others_hold
    other = waiting(session: true)
    @server.await_info("waiters", 1)
    other_releases
    other.value.release
    assert @server.free?("k")
  end

  def test_another_database
    # redis-rb 5 does not say which one was selected, and forgets it when it connects again.
    Redis::VERSION.start_with?("4") ? @redis.select(3) : @redis = @server.connect(db: 3)
    @server.operator.select(3)
    hold = acquire(lease: 0.3)
    assert_equal 1, @server.do("EXISTS", "k")
    sleep 0.6
    hold.check!
    other = waiting
    @server.await_info("waiters", 1)
    hold.release
    other.value.release
    assert @server.free?("k")
  end

  def test_interrupted_in_line
    before = nil
    40.times do |i|
      others_hold("k#{i}")
      thread = i.even? ? waiting("k#{i}", also: ["b#{i}"], owner: i % 3 == 0 ? "worker #{i}" : nil) : nil
      if thread
        @server.await_info("waiters", 1)
        i % 4 == 0 ? thread.raise(Cut) : thread.kill
        i % 4 == 0 ? assert_instance_of(Cut, thread.value) : thread.join
      else
        assert_raises(Timeout::Error) { Timeout.timeout(0.03) { acquire("k#{i}", wait: PATIENCE) } }
      end
      assert_equal 0, @server.info("waiters")
      other_releases("k#{i}")
      before ||= @server.connections
    end
    assert_equal 0, @server.do("DBSIZE")
    assert_operator @server.connections - before, :<=, 4, "its connection is used again"
  end

  def test_interrupted_at_any_moment
    200.times do |i|
      others_hold if i.even?
      thread = Thread.new { Turnstile.lock(@redis, "k", lease: 60, wait: PATIENCE) { sleep } }
      thread.report_on_exception = false
      sleep (i % 20) * 0.0003
      other_releases if i % 4 == 0
      if i % 3 == 0
        thread.kill
        assert thread.join(PATIENCE), "it ends"
      else
        thread.raise(Cut)
        assert_raises(Cut) { thread.join(PATIENCE) }
      end
      other_releases
      assert @server.free?("k"), "round #{i}"
    end
  end

  def test_an_interrupted_upgrade_keeps_the_shared_hold
    other = acquire(shared: true)
    reader = acquire(shared: true, owner: "worker")
    10.times do
      thread = waiting(owner: "worker")
      @server.await_info("waiters", 1)
      thread.raise(Cut)
      assert_instance_of Cut, thread.value
      @server.await_info("waiters", 0)
      reader.touch
    end
    other.release
    reader.run("SET", "data", "x") # under the token of before
    reader.release
    assert @server.free?("k")
  end

  def test_a_lost_reply
    [0, 1].each do |wait|
      reacquired = @server.info("reacquired")
      # redis-rb itself asks once more on the caller's connection
      hold = acquire(redis: proxy("LOCK.ACQUIRE", 3), wait: wait)
      assert_equal @server.do("LOCK.FENCE", "k"), hold.token
      assert_equal reacquired + 3, @server.info("reacquired")
      hold.release
      assert @server.free?("k")
    end
    [false, true].each do |session|
      hold = acquire(redis: proxy("LOCK.RELEASE", 2), session: session)
      # The last try gets 0: while the lease lasts only the first can have done it, but for a session nobody knows.
      session ? assert_raises(Turnstile::Lost) { hold.release } : hold.release
      assert @server.free?("k")
    end
  end

  def test_a_connection_lost_in_line
    others_hold
    other = waiting
    2.times do |i|
      @server.await_info("waiters", 1)
      @server.do("CLIENT", "KILL", "ID", @server.blocked_client)
      @server.await_info("waits", i + 2)
    end
    other_releases
    other.value.release
  end

  def test_giving_up_leaves_nothing_behind
    redis = proxy("LOCK.ACQUIRE", 1_000)
    [nil, "worker"].each_with_index do |owner, i|
      assert_raises(Redis::BaseConnectionError) { acquire(redis: redis, wait: 0.2, timeout: 0.3, owner: owner) }
      assert_equal i + 1, @server.info("acquired")
      assert @server.free?("k")
    end
    # What the same owner has by another call is kept.
    redis = proxy("SHARED", 1_000)
    older = acquire(redis: redis, owner: "worker")
    assert_raises(Redis::BaseConnectionError) { acquire(redis: redis, timeout: 0.3, owner: "worker", shared: true) }
    older.touch
    older.release
    assert @server.free?("k")
  end

  def test_a_server_that_stands_still
    @server.do("CONFIG", "SET", "requirepass", "secret") # a new connection has to wait for an answer first
    @redis = @server.connect(password: "secret")
    [0, 0.1].each_with_index do |wait, i|
      @redis.ping
      @server.signal(:STOP)
      assert_includes 0.2..4, took {
        assert_raises(Redis::BaseConnectionError) { acquire(wait: wait, timeout: 0.2, lease: 60) }
      }
      @server.signal(:CONT)
      await("it was granted") { @server.info("acquired") + @server.info("reacquired") > i }
      await("it is given up") { @server.free?("k") }
    end
    # In line, while the server stops and comes back.
    others_hold
    thread = waiting(timeout: 0.5, lease: 60)
    @server.await_info("waiters", 1)
    @server.signal(:STOP)
    thread.raise(Cut)
    assert thread.join(PATIENCE)
    @server.signal(:CONT)
    other_releases
    await("it is given up") { @server.free?("k") }
  end

  def test_a_fork_has_a_copy_only
    hold = acquire(lease: 0.6)
    others_hold("line")
    assert_raises(Turnstile::NotAcquired) { acquire("line", wait: 0.01) } # leaves a connection that has waited
    child = fork do
      hold.release
      Turnstile.lock(@server.connect, "child", lease: 0.3) { |own| sleep(0.6) && own.check! }
      begin
        @redis.close
        Turnstile.lock(@redis, "line", wait: 0.1) { nil }
      rescue Turnstile::NotAcquired
        Process.exit!(7)
      end
    ensure
      Process.exit!(1)
    end
    _, status = Process.wait2(child)
    assert_equal 7, status.exitstatus
    hold.check!
    assert_equal hold.token, @server.do("LOCK.FENCE", "k")
    hold.release
  end

  def test_errors_are_told_apart
    first = acquire("x", owner: "a")
    acquire("y", owner: "b")
    other = waiting("y", owner: "a")
    @server.await_info("waiters", 1)
    assert_raises(Turnstile::Deadlock) { acquire("x", wait: 1, owner: "b") }
    @server.do("CONFIG", "SET", "turnstile.max-waiters", 1)
    assert_raises(Turnstile::WaitLimit) { acquire("x", wait: 1) }
    @server.do("CLIENT", "UNBLOCK", @server.blocked_client, "ERROR")
    assert_instance_of Turnstile::Superseded, other.value
    assert_instance_of Turnstile::Error, assert_raises(Turnstile::Error) { acquire(lease: 1e9) }
    @server.do("LPUSH", "list", 1)
    assert_match(/\AWRONGTYPE/, assert_raises(Turnstile::Error) { acquire("list") }.message)
    @server.do("REPLICAOF", "127.0.0.1", 1)
    assert_raises(Turnstile::NotPrimary) { acquire("z") }
    assert_raises(Turnstile::NotPrimary) { acquire("z", session: true) }
    assert_raises(Turnstile::NotPrimary) { first.touch }
    first.check! # a fail-over may still end well
    cluster = Server.new("--cluster-enabled", "yes")
    assert_raises(Turnstile::Moved) { acquire(redis: cluster.connect) }
    @server.stop
    assert_raises(Redis::BaseConnectionError) { acquire("z", timeout: 0.2) }
  ensure
    cluster&.remove
  end

  def test_the_demo
    libraries = $LOAD_PATH.flat_map { |path| ["-I", path.to_s] } # the same redis-rb
    demo = File.join(__dir__, "../../client-examples/ruby/demo.rb")
    output = IO.popen([RbConfig.ruby, *libraries, demo, "127.0.0.1", @server.port.to_s, err: %i[child out]], &:read)
    assert_equal [true, "done"], [$?.success?, output.lines.last&.chomp], output
    assert_equal 0, @server.do("DBSIZE")
  end
end
