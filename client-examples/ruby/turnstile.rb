# frozen_string_literal: true

# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors

require "monitor"
require "redis"
require "securerandom"

# A small client for the locks of the Turnstile module, over redis-rb 4.8 or 5. One file, to copy. Ruby 2.7 or later.
#
#   Turnstile.lock(redis, "table:12", lease: 10, wait: 5) do |hold|
#     hold.run("SET", "table:12:guest", "alice")   # written only while this hold has the lock
#     hold.check!                                  # raises Lost if the lock may be somebody else's now
#   end
#
# All times are in seconds. While the work runs, the lease is renewed at each third of it, for all holds of the process in
# one thread. Hand hold.token to every store outside that can refuse a token lower than one it has seen.
#
# A lock that is free is taken and released over the connection of `redis`. For each such object there are, when they are
# needed, one more connection to renew over, and up to four that wait and are kept for the next ones: what `redis` itself
# is busy with keeps neither back. (A connection pool of yours: pool.with { |redis| Turnstile.lock(redis, ...) }.) Name the
# database when you connect: a SELECT afterwards redis-rb 5 itself forgets when it connects again.
module Turnstile
  # What the server refused. Trouble with the connection is redis-rb's own Redis::BaseConnectionError.
  class Error < StandardError; end
  # Others hold the lock, or the wait ran out.
  class NotAcquired < Error; end
  # The hold is lost: its lease ran out, or an operator removed it.
  class Lost < Error; end
  # Held for the maximum time.
  class MaxHold < Lost; end
  # The token does not hold the lock: nothing was written.
  class Fenced < Error; end
  # Waiting would close a cycle.
  class Deadlock < Error; end
  # The wait was ended from outside, or the server was demoted.
  class Superseded < Error; end
  # Too many wait on this server.
  class WaitLimit < Error; end
  # This server is a replica.
  class NotPrimary < Error; end
  # The cluster keeps this lock elsewhere.
  class Moved < Error; end

  ERRORS = {
    "FENCED" => Fenced, "DEADLOCK" => Deadlock, "UNBLOCKED" => Superseded, "WAITLIMIT" => WaitLimit,
    "READONLY" => NotPrimary, "MOVED" => Moved, "ASK" => Moved, "TRYAGAIN" => Moved, "CLUSTERDOWN" => Moved
  }.freeze
  PAUSE = 0.05 # before asking again
  private_constant :ERRORS, :PAUSE

  class << self
    # Takes the lock, yields the hold, and gives the lock up however the block is left. Lost if the hold was not ours to
    # the end; what the block raises comes first. The options:
    #
    # lease::    how long the lock outlives a process that died; 10 by default
    # wait::     how long to stand in line; 0, the default: one try
    # max_hold:: renew no longer than this; then check! raises MaxHold
    # timeout::  how long the server may be slow or away when a lock is acquired, on top of the wait; 2 by default
    # shared::   together with other shared holders
    # limit::    up to so many holders; with weight: this one counts for so many of them
    # also::     these locks too, all or none, under one token; but see Hold#run
    # linger::   after a crash the lock stays closed for so much longer
    # max_line:: do not join a line of so many
    # tag::      what LOCK.INFO and error messages show of this hold
    # session::  the hold also ends with this process; it has a connection of its own
    # owner::    the same one for all locks of a worker that takes one while it holds another: only so can the server see a
    #            deadlock. Random, never shared with another thread. A new one for each hold by default.
    def lock(redis, key, **options)
      hold = Hold.new(redis, key, **options)
      before = $! # the error that the caller is just handling, if there is one
      begin
        hold.acquire
        yield hold
      ensure
        hold.token && $!.equal?(before) ? hold.release : hold.give_up
      end
    end

    # The same without a block. Whoever gets the hold releases it.
    def acquire(redis, key, **options)
      hold = Hold.new(redis, key, **options)
      acquired = false
      begin
        hold.acquire
        acquired = true
      ensure
        hold.give_up unless acquired
      end
      hold
    end

    # Calls with this read time-out, and without a second try, which would take as long again.
    def within(redis, timeout)
      timeout = [timeout, 0.001].max
      redis.without_reconnect do
        client = redis._client
        next client.with_socket_timeout(timeout) { yield } if client.respond_to?(:with_socket_timeout) # redis-rb 4

        before = client.read_timeout
        begin
          client.read_timeout = timeout
          yield
        ensure
          client.read_timeout = before
        end
      end
    end

    # By a clock that nobody sets.
    def now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end

    def milliseconds(seconds)
      [(seconds * 1000).round, 1].max
    end

    # Errors that a caller may want to tell apart get a class of their own. (To redis-rb 5 READONLY is trouble with the
    # connection.)
    def translate(error)
      known = ERRORS[error.message[/\A\S+/]]
      return error if known.nil? && !error.is_a?(Redis::CommandError)

      (known || Error).new(error.message)
    end
  end

  # A lock that is being acquired, held, or over. Any thread may use it.
  class Hold
    # The token is larger than that of every earlier holder.
    attr_reader :key, :owner, :token, :lease, :due, :connections

    def initialize(redis, key, lease: 10, wait: 0, max_hold: nil, timeout: 2, shared: false, limit: nil, weight: nil,
                   also: [], linger: nil, max_line: nil, tag: nil, session: false, owner: nil)
      @redis, @key, @wait, @max_hold, @timeout, @also = redis, key, wait, max_hold, timeout, also
      @lease = Turnstile.milliseconds(lease) / 1000.0 # what the server counts in: ours must not be longer
      @owner = owner || SecureRandom.hex(16)
      @chosen = !owner.nil?
      @session = session
      @max_line = max_line
      @options = []
      @options << "SHARED" if shared
      @options.push("LIMIT", limit) if limit
      @options.push("WEIGHT", weight) if weight
      @options.push("LINGER", Turnstile.milliseconds(linger)) if linger
      @options.push("TAG", tag) if tag
      @options << "SESSION" if session
      @connections = Connections.of(redis)
      @monitor = Monitor.new
      @state = :new # then :asked, :held, :over
      @pid = Process.pid
    end

    # Raises Lost if the lock may be somebody else's now. Asks nobody.
    def check!
      why = @monitor.synchronize do
        finish(Lost.new("could not renew it in time")) if @state == :held && Turnstile.now >= @until
        finish(MaxHold.new("held for the maximum time")) if @state == :held && @max_until && Turnstile.now >= @max_until
        @why || (@state == :held ? nil : Lost.new("it was released"))
      end
      raise why if why
    end

    def lost?
      check!
      false
    rescue Lost
      true
    end

    # Starts the lease anew now. The hold does that by itself; call it before a step that must not be cut short.
    def touch
      check!
      sent = Turnstile.now
      touched(sent, call(@redis, *due_command))
      check!
    end

    # Runs a command if and only if this hold still has the lock, in one step of the server; else Fenced. With `also` it
    # looks at the first lock only: name the lock that guards what is written first.
    def run(*command)
      call(@redis, "LOCK.FENCE", @key, @token, "THEN", *command)
    rescue Fenced => error
      @monitor.synchronize { finish(Lost.new(error.message)) }
      raise
    end

    # Gives the lock up. Lost if it was not ours to the end: then the work may have had company. Once more does nothing.
    def release
      return if Process.pid != @pid # a fork has a copy only

      ends = nil
      @monitor.synchronize do
        return if @released || @state == :new

        @released = true
        ends = @until
        finish(nil)
      end
      begin
        count = call(@redis, *release_command)
      rescue Redis::BaseConnectionError
        # Perhaps only the reply was lost. Then 0 means that the first try did it, if the lease lasts yet; but a session
        # may have ended together with the connection.
        count = call(@redis, *release_command)
        count = keys.size if count.zero? && !@session && Turnstile.now < ends
      end
      raise @why if @why.is_a?(Lost) && !@why.is_a?(MaxHold)
      raise Lost, "it was lost before its release" if count != keys.size
    ensure
      hang_up
    end

    # Gives up what is held, or was asked for and may yet be granted. Raises nothing: a lease ends what is left.
    def give_up
      return release if @state == :held || @why

      leave if @state == :asked && Process.pid == @pid
    rescue StandardError
      nil
    end

    # For Turnstile.lock and Turnstile.acquire.
    def acquire
      wait_end = Turnstile.now + @wait
      deadline = wait_end + @timeout
      waiting = @session # a session needs a connection of its own
      loop do
        sent = Turnstile.now
        begin
          token = ask(waiting, wait_end - sent, deadline)
        rescue Redis::BaseConnectionError
          # As long as the owner is the same, asking twice is safe: the server answers with the same token.
          @unsure = true
          raise if Turnstile.now + PAUSE >= deadline

          sleep PAUSE
          next
        rescue Error => error
          # Nothing was granted by this call. By one before, perhaps; unless a newer call of the same owner goes on with it.
          refused unless @unsure && !(error.is_a?(Superseded) && @chosen)
          raise
        end
        if token.nil?
          if !waiting && Turnstile.now < wait_end
            waiting = true
            next
          end
          refused
          raise NotAcquired, who_holds
        end
        raise Error, "within multi or pipelined: locks need the answer at once" unless token.is_a?(Integer)
        return granted(token, sent) if Turnstile.now - sent < @lease / 3
        raise Redis::TimeoutError, "granted, but the server is too slow for the lease" if Turnstile.now >= deadline

        # We stood in line, so the lease began somewhere in the time that the call took. Asking once more, without waiting,
        # starts it anew.
        @unsure = true
        wait_end = sent
        waiting = @session
      end
    end

    # For the renewal, to which a release belongs that the server has not answered.
    def due_command
      @leaving ? release_command : ["LOCK.TOUCH", @key, @owner, "PX", Turnstile.milliseconds(@lease), *also_arguments]
    end

    def idle?
      !@leaving && lost?
    end

    def touched(sent, count)
      @monitor.synchronize do
        return Renewal.remove(self) if @leaving
        return if @state != :held

        if count == keys.size
          @until = sent + @lease
          @due = sent + @lease / 3
        else
          finish(Lost.new("the server no longer knows it"))
        end
      end
    end

    # It has failed: once more, soon. The end of the lease decides when it is too late.
    def put_off
      @monitor.synchronize do
        @due = Turnstile.now + [@lease / 10, 1].min
        Renewal.remove(self) if @leaving && @due > @until
      end
    end

    def keys
      [@key, *@also]
    end

    private

    def ask(waiting, left, deadline)
      @state = :asked
      options = ["PX", Turnstile.milliseconds(@lease)]
      if waiting && left > 0.001
        options.push("WAIT", (left * 1000).to_i)
        options.push("MAXLINE", @max_line) if @max_line
      end
      command = ["LOCK.ACQUIRE", @key, @owner, *options, *@options, *also_arguments]
      return call(@redis, *command) unless waiting

      @waiter ||= @connections.take_waiter
      @answer = Waiter::Answer.new
      @waiter.ask(command, deadline - Turnstile.now + @timeout, @answer) # so long may leave take
      @answer.value(deadline - Turnstile.now)
    end

    def refused
      @state = :over
      keep_waiter
    end

    def granted(token, sent)
      @monitor.synchronize do
        @token = token
        @until = sent + @lease
        @max_until = sent + @max_hold if @max_hold
        @due = sent + @lease / 3
        @state = :held
      end
      keep_waiter unless @session
      Renewal.add(self)
    end

    # Ends the wait and gives up what may have been granted. Closing the connection is not enough: the server may hand us
    # the lock before it notices.
    def leave
      return if @chosen && Renewal.held?(self) # a release would give up the older hold too; the wait ends as we hang up

      # A call that was cut off leaves redis-rb a broken connection. The next one it opens stands behind the request.
      return call(@redis, *release_command) if @answer.nil?

      ends = Turnstile.now + @timeout
      loop do
        call(@connections.side, *release_command)
        begin
          token = @answer.value(PAUSE)
          call(@connections.side, *release_command) if token # granted after all
        rescue Error, Redis::BaseError
          # Perhaps the release has overtaken the request: then it did nothing.
          next if !@answer.over? && Turnstile.now < ends
        end
        keep_waiter if @answer.over?
        break
      end
    rescue Redis::BaseConnectionError
      # It may read the request yet, when it is back, and grant it.
      @leaving = true
      @until = Turnstile.now + @lease
      @due = Turnstile.now + PAUSE
      Renewal.add(self)
    ensure
      @state = :over
      hang_up
    end

    # For the next one that waits.
    def keep_waiter
      @connections.give_back(@waiter) if @waiter
      @waiter = @answer = nil
    end

    def hang_up
      @waiter&.close
      @waiter = @answer = nil
    end

    def finish(why)
      return if @state == :over

      @why = why
      @state = :over
      Renewal.remove(self)
    end

    def call(redis, *command)
      redis.call(*command)
    rescue Redis::BaseError => error
      raise Turnstile.translate(error)
    end

    def release_command
      ["LOCK.RELEASE", @key, @owner, *also_arguments]
    end

    def also_arguments
      @also.empty? ? [] : ["ALSO", @also.size, *@also]
    end

    # A text for people, by the tags: an owner is a proof, so it is not shown.
    def who_holds
      keys.each do |key|
        info = to_map(call(@redis, "LOCK.INFO", key))
        next unless info["holding"].to_i.positive?

        first = to_map(info["holders"].first)
        return "lock #{key} is held by #{first["tag"] || "another owner"} for another #{first["lease-left-ms"].to_i} ms; " \
               "#{info["waiting"]} wait"
      end
      "others held lock #{@key}"
    rescue StandardError
      "others hold lock #{@key}" # the error that is to be explained counts, not this one
    end

    def to_map(reply)
      reply.is_a?(Array) ? reply.each_slice(2).to_h : reply.to_h
    end
  end

  # The connections beside that of a Redis object. They live as long as it does.
  class Connections
    IDLE = 4
    @lock = Mutex.new

    def self.of(redis)
      @lock.synchronize do
        found = redis.instance_variable_get(:@turnstile_connections)
        return found if found&.usable?

        redis.instance_variable_set(:@turnstile_connections, new(redis))
      end
    end

    def initialize(redis)
      @redis = redis
      @pid = Process.pid
      @lock = Mutex.new
      @idle = []
    end

    # Threads and connections do not survive a fork.
    def usable?
      @pid == Process.pid
    end

    # To renew and to give up over.
    def side
      @lock.synchronize { @side ||= another }
    end

    def take_waiter
      @lock.synchronize { @idle.pop } || Waiter.new(another)
    end

    def give_back(waiter)
      @lock.synchronize do
        return @idle.push(waiter) if @idle.size < IDLE
      end
      waiter.close
    end

    private

    # With the database that is selected now.
    def another
      copy = @redis.dup
      database = @redis.connection[:db]
      copy.select(database) if copy.connection[:db] != database
      copy
    end
  end

  # A connection that waits, and the thread that reads from it: so whoever waits can be interrupted, and go on reading.
  class Waiter
    # What comes of a call.
    class Answer
      def initialize
        @lock = Mutex.new
        @came = ConditionVariable.new
      end

      def set(value, error)
        @lock.synchronize do
          @value, @error, @over = value, error, true
          @came.broadcast
        end
      end

      def over?
        @lock.synchronize { @over }
      end

      def value(timeout)
        ends = Turnstile.now + timeout
        @lock.synchronize do
          until @over
            left = ends - Turnstile.now
            raise Redis::TimeoutError, "no answer in time" if left <= 0

            @came.wait(@lock, left)
          end
          raise @error if @error

          @value
        end
      end
    end

    def initialize(redis)
      @redis = redis
      @calls = Queue.new
      @thread = Thread.new { work }
      @thread.report_on_exception = false
    end

    def ask(command, timeout, answer)
      @calls << [command, timeout, answer]
    end

    def close
      @calls.close
      @thread.kill
      @redis.close
    end

    private

    def work
      while (command, timeout, answer = @calls.pop)
        begin
          answer.set(Turnstile.within(@redis, timeout) { @redis.call(*command) }, nil)
        rescue StandardError => error
          answer.set(nil, Turnstile.translate(error))
        end
      end
    end
  end

  # One thread touches all holds of the process.
  module Renewal
    @monitor = Monitor.new
    @changed = @monitor.new_cond
    @holds = {}.compare_by_identity

    class << self
      def add(hold)
        @monitor.synchronize do
          start if @pid != Process.pid || !@thread&.alive?
          @holds[hold] = true
          @changed.signal if @next.nil? || hold.due < @next
        end
      end

      def remove(hold)
        @monitor.synchronize { @holds.delete(hold) }
      end

      # Whether another call got one of these locks for the same owner, and its hold lasts.
      def held?(asking)
        holds = @monitor.synchronize { @holds.keys }
        holds.any? { |hold| hold.owner == asking.owner && (hold.keys & asking.keys).any? && !hold.lost? }
      end

      private

      def start
        @holds.clear if @pid != Process.pid # those of the parent
        @pid = Process.pid
        @thread = Thread.new { work }
        @thread.name = "turnstile renewal"
      end

      def work
        loop do
          due = @monitor.synchronize do
            @next = @holds.keys.map(&:due).min
            left = @next ? @next - Turnstile.now : nil
            @changed.wait(left) if left.nil? || left.positive?
            @holds.keys.select { |hold| hold.due <= Turnstile.now }
          end
          due.group_by(&:connections).each { |connections, holds| renew(connections.side, holds.reject(&:idle?)) }
        end
      end

      # A server that is silent must not keep the holds on another one back for long.
      def renew(redis, holds)
        return if holds.empty?

        sent = Turnstile.now
        counts = Turnstile.within(redis, [holds.map(&:lease).min / 3, 1].min) do
          redis.pipelined { |pipeline| holds.each { |hold| pipeline.call(*hold.due_command) } }
        end
        holds.zip(counts) { |hold, count| hold.touched(sent, count) }
      rescue Redis::CommandError
        # The server refused one of them: that must not keep the others back.
        holds.size > 1 ? holds.each { |hold| renew(redis, [hold]) } : holds.each(&:put_off)
      rescue StandardError
        holds.each(&:put_off)
      end
    end
  end

  private_constant :Connections, :Waiter, :Renewal
end
