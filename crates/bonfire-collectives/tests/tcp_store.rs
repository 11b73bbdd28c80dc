//! What is particular to a store behind a port: strangers, ports in use, a host that goes, threads that end.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    num::NonZeroUsize,
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{LaunchOptions, Refusal, Store, StoreError, TcpStore, Token};
use proptest::prelude::*;

/// No test comes near it: an error that only the timeout brings shows.
const TIMEOUT: Duration = Duration::from_secs(20);
/// A busy machine must not fail a test; what hangs takes longer than this.
const PROMPT: Duration = Duration::from_secs(8);
const LOCAL: &str = "127.0.0.1";

fn token() -> Token {
    Token::new("campfire").unwrap()
}

fn host(world_size: usize) -> TcpStore {
    TcpStore::host(LOCAL, 0, token(), NonZeroUsize::new(world_size).unwrap()).unwrap()
}

fn connect(host: &TcpStore, rank: usize) -> Result<TcpStore, StoreError> {
    TcpStore::connect(LOCAL, host.port(), token(), rank, TIMEOUT)
}

fn stranger(host: &TcpStore) -> TcpStream {
    let stream = TcpStream::connect((LOCAL, host.port())).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// A new rank gets in, and what it sets arrives, soon.
fn still_serves(host: &TcpStore) {
    let start = Instant::now();
    let rank = connect(host, 1).unwrap();
    let sum = rank.add("alive", 1).unwrap();
    assert_eq!(host.get("alive", TIMEOUT).unwrap(), sum.to_string().into_bytes());
    assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
}

/// The threads of this process that serve a port.
#[cfg(target_os = "linux")]
fn num_threads(port: u16) -> usize {
    let name = format!("store-{port}");
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|found| found.trim() == name).count()
}

/// A thread names itself after it has started, and is listed a moment longer than it lasts.
#[cfg(target_os = "linux")]
fn soon_has_threads(port: u16, expected: usize) {
    let start = Instant::now();
    while num_threads(port) != expected {
        assert!(start.elapsed() < PROMPT, "{} threads, not {expected}", num_threads(port));
        thread::sleep(Duration::from_millis(1));
    }
}

/// A valid hello with some other token, version or magic, as this version of the protocol has it.
fn hello(magic: &[u8; 8], version: u16, token: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::from(magic);
    bytes.extend(version.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend((token.len() as u16).to_le_bytes());
    bytes.extend(token);
    bytes.resize(272, 0);
    bytes
}

/// A connection of somebody who knows the token and then writes what he likes.
fn rogue(host: &TcpStore) -> TcpStream {
    let mut stream = stranger(host);
    stream.write_all(&hello(b"bonfire\n", 1, b"campfire")).unwrap();
    let mut outcome = [0; 11];
    stream.read_exact(&mut outcome).unwrap();
    assert_eq!(outcome[10], 0, "welcome");
    stream
}

/// Reads until the other side closes.
fn closes(mut stream: TcpStream) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
}

#[test]
fn a_run_of_one_rank_hosts_at_a_free_port_and_two_such_runs_do_not_meet() {
    let config = LaunchOptions::default().resolve_with(|_| None).unwrap();
    let [one, other] = [(); 2].map(|()| TcpStore::join(&config, TIMEOUT).unwrap());
    assert_ne!(one.port(), other.port());
    one.set("key", b"one").unwrap();
    other.set("key", b"other").unwrap();
    assert_eq!(one.get("key", TIMEOUT).unwrap(), b"one");
}

#[test]
fn ranks_join_by_their_launch_configuration_whoever_comes_first() {
    // Found free a moment ago.
    let port = TcpListener::bind((LOCAL, 0)).unwrap().local_addr().unwrap().port();
    let join = |rank: usize| {
        let options = LaunchOptions {
            rank: Some(rank),
            local_rank: Some(rank),
            world_size: Some(3),
            address: Some("localhost".into()),
            port: Some(port),
            token: Some(token()),
        };
        TcpStore::join(&options.resolve_with(|_| None).unwrap(), TIMEOUT).unwrap()
    };
    thread::scope(|scope| {
        let others = [1, 2].map(|rank| {
            scope.spawn(move || {
                let store = join(rank);
                store.add("joined", 1).unwrap();
                store.get("welcome", TIMEOUT).unwrap()
            })
        });
        thread::sleep(Duration::from_millis(100));
        let store = join(0);
        store.set("welcome", b"all").unwrap();
        for other in others {
            assert_eq!(other.join().unwrap(), b"all");
        }
        assert_eq!(store.add("joined", 0).unwrap(), 2);
    });
}

/// CASES 38
#[test]
fn a_busy_port_is_an_error_that_shows_the_address() {
    for address in [LOCAL, "localhost", "0.0.0.0"] {
        let host = |port| TcpStore::host(address, port, token(), NonZeroUsize::MIN);
        let first = host(0).unwrap();
        let port = first.port();
        let error = host(port).err().expect("it is taken");
        assert_eq!(error, StoreError::PortInUse { address: format!("{address}:{port}") });
        assert!(error.to_string().contains("MASTER_PORT"), "{error}");
        drop(first);
        host(port).unwrap();
    }
}

#[test]
fn nobody_at_the_port_is_an_error_within_the_timeout() {
    let port = TcpListener::bind((LOCAL, 0)).unwrap().local_addr().unwrap().port();
    let start = Instant::now();
    let error = TcpStore::connect(LOCAL, port, token(), 3, Duration::from_millis(300)).err().expect("nobody is there");
    assert!(start.elapsed() < PROMPT);
    let message = error.to_string();
    for part in ["rank 3", &format!("{LOCAL}:{port}"), "MASTER_ADDR", "rank 0 runs"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn something_else_at_the_port_is_told_apart() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            closes(stream);
        });
        let error = TcpStore::connect(LOCAL, port, token(), 1, TIMEOUT).err().expect("it is no store");
        assert!(matches!(error, StoreError::Refused { refusal: Refusal::NotAStore, .. }), "{error}");
    });
    // And one that never says a word.
    let error = TcpStore::connect(LOCAL, port, token(), 1, Duration::from_millis(300)).err().expect("it is silent");
    assert!(matches!(&error, StoreError::Connect { reason, .. } if reason == "no answer"), "{error}");
}

#[test]
fn a_wrong_token_is_turned_away_at_once_and_stores_nothing() {
    let host = host(2);
    for wrong in ["", "campfir", "campfire!", "CAMPFIRE"] {
        let start = Instant::now();
        let token = Token::new(wrong).unwrap();
        let error = TcpStore::connect(LOCAL, host.port(), token, 1, TIMEOUT).err().expect("it is wrong");
        assert!(matches!(error, StoreError::Refused { rank: 1, refusal: Refusal::Token, .. }), "{error}");
        assert!(error.to_string().contains("BONFIRE_TOKEN") && start.elapsed() < PROMPT, "{error}");
    }
    // Who does not wait for the answer is not heard either.
    let mut stream = stranger(&host);
    let mut bytes = hello(b"bonfire\n", 1, b"guess");
    bytes.extend([14, 0, 0, 0, 0, 4, 0, 0, 0, b'e', b'v', b'i', b'l', 1, 0, 0, 0, b'!']);
    stream.write_all(&bytes).unwrap();
    closes(stream);
    assert!(matches!(host.get("evil", Duration::from_millis(50)), Err(StoreError::Timeout { .. })));
    still_serves(&host);
}

#[test]
fn another_version_of_the_protocol_is_told_both_versions() {
    let host = host(2);
    let mut stream = stranger(&host);
    stream.write_all(&hello(b"bonfire\n", 9, b"campfire")).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"bonfire\n\x01\x00\x01", "the host's version, and why");

    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(b"bonfire\n\x09\x00\x01").unwrap();
            closes(stream);
        });
        let error = TcpStore::connect(LOCAL, port, token(), 1, TIMEOUT).err().expect("it is too new");
        let refusal = Refusal::Version { host: 9, own: 1 };
        assert!(matches!(error, StoreError::Refused { refusal: found, .. } if found == refusal), "{error}");
    });
}

#[test]
fn a_timeout_names_the_ranks_that_never_joined() {
    let host = host(5);
    let others = [connect(&host, 1).unwrap(), connect(&host, 3).unwrap()];
    for store in [&host, &others[0]] {
        let error = store.get("missing", Duration::from_millis(50)).unwrap_err();
        assert!(matches!(&error, StoreError::Timeout { absent, .. } if absent == &[2, 4]), "{error}");
        assert!(error.to_string().contains("ranks [2, 4] never joined"), "{error}");
    }
}

#[test]
fn a_host_that_goes_is_noticed_by_who_waits_and_by_who_comes_later() {
    let host = host(4);
    let (waiting, idle) = (connect(&host, 1).unwrap(), connect(&host, 2).unwrap());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let start = Instant::now();
            (waiting.get("never", TIMEOUT).unwrap_err(), start.elapsed())
        });
        thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        drop(host);
        assert!(start.elapsed() < PROMPT, "closing took {:?}", start.elapsed());
        let (error, waited) = waiter.join().unwrap();
        assert!(waited < PROMPT, "{waited:?}");
        let message = error.to_string();
        assert!(matches!(error, StoreError::HostGone { rank: 1, .. }), "{message}");
        assert!(message.contains("rank 0 has ended") && message.contains(LOCAL), "{message}");
    });
    let first = idle.set("key", b"").unwrap_err();
    assert!(matches!(first, StoreError::HostGone { rank: 2, .. }), "{first}");
    assert_eq!(idle.add("key", 1).unwrap_err(), first, "it stays gone, with its first cause");
}

#[test]
fn a_host_that_falls_silent_is_noticed_a_little_after_the_timeout() {
    // A host whose machine lost its power looks like one that says welcome and then nothing.
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(b"bonfire\n\x01\x00\x00").unwrap();
            closes(stream);
        });
        let store = TcpStore::connect(LOCAL, port, token(), 1, TIMEOUT).unwrap();
        let start = Instant::now();
        let error = store.get("key", Duration::from_millis(100)).unwrap_err();
        assert!(matches!(&error, StoreError::HostGone { reason, .. } if reason == "no answer"), "{error}");
        assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
    });
}

#[cfg(target_os = "linux")]
#[test]
fn no_thread_is_left_when_the_store_is_dropped() {
    let host = host(3);
    let port = host.port();
    soon_has_threads(port, 1);
    let ranks = [connect(&host, 1).unwrap(), connect(&host, 2).unwrap()];
    let silent: Vec<_> = (0..5).map(|_| stranger(&host)).collect();
    thread::scope(|scope| {
        let waits = ranks.each_ref().map(|rank| scope.spawn(|| rank.get("never", TIMEOUT)));
        soon_has_threads(port, 1 + 2 + 5);
        let clone = host.clone();
        drop(host);
        clone.set("key", b"a clone keeps it").unwrap();
        assert_eq!(num_threads(port), 1 + 2 + 5);
        drop(clone);
        soon_has_threads(port, 0);
        for wait in waits {
            wait.join().unwrap().unwrap_err();
        }
    });
    drop(silent);
}

#[test]
fn connections_of_ranks_are_bounded_and_free_their_place() {
    let host = host(2);
    let ranks: Vec<_> = (0..256).map(|_| connect(&host, 1).unwrap()).collect();
    let error = connect(&host, 1).err().expect("it is one too many");
    assert!(matches!(error, StoreError::Refused { refusal: Refusal::Crowded, .. }), "{error}");
    ranks[255].set("key", b"still served").unwrap();
    drop(ranks);
    let start = Instant::now();
    while connect(&host, 1).is_err() {
        assert!(start.elapsed() < PROMPT);
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_that_leave_disturb_nobody() {
    let host = host(3);
    for _ in 0..20 {
        connect(&host, 2).unwrap().set("key", b"value").unwrap();
    }
    still_serves(&host);
}

#[test]
fn a_hundred_silent_connections_keep_nobody_out() {
    let host = host(2);
    let silent: Vec<_> = (0..100).map(|_| stranger(&host)).collect();
    still_serves(&host);
    // Nor do more than it takes: the oldest make room.
    let more: Vec<_> = (0..300).map(|_| stranger(&host)).collect();
    still_serves(&host);
    #[cfg(target_os = "linux")]
    assert!(num_threads(host.port()) < 300, "{}", num_threads(host.port()));
    // All are sent away, which frees what they held.
    for stream in silent.into_iter().chain(more) {
        closes(stream);
    }
    still_serves(&host);
}

#[test]
fn a_hundred_ranks_join_at_once() {
    let host = host(101);
    thread::scope(|scope| {
        for rank in 1..=100 {
            let host = &host;
            scope.spawn(move || {
                let store = connect(host, rank).unwrap();
                store.set(&format!("rank/{rank}"), b"").unwrap();
                store.get("go", TIMEOUT).unwrap();
            });
        }
        for rank in 1..=100 {
            host.get(&format!("rank/{rank}"), TIMEOUT).unwrap();
        }
        host.set("go", b"").unwrap();
    });
}

#[test]
fn who_says_hello_a_byte_at_a_time_is_sent_away() {
    let host = host(2);
    let mut stream = stranger(&host);
    let start = Instant::now();
    // It would take 27 seconds in all.
    for byte in hello(b"bonfire\n", 1, b"campfire") {
        if stream.write_all(&[byte]).is_err() {
            break;
        }
        thread::sleep(Duration::from_millis(100));
        assert!(start.elapsed() < PROMPT, "it is still let talk");
    }
    still_serves(&host);
}

#[test]
fn half_open_and_half_sent_connections_end() {
    let host = host(2);
    let mut half_hello = stranger(&host);
    half_hello.write_all(&hello(b"bonfire\n", 1, b"campfire")[..100]).unwrap();
    half_hello.shutdown(Shutdown::Write).unwrap();
    closes(half_hello);
    let mut half_frame = rogue(&host);
    half_frame.write_all(&[200, 0, 0, 0, 0, 1]).unwrap();
    half_frame.shutdown(Shutdown::Write).unwrap();
    closes(half_frame);
    still_serves(&host);
}

#[test]
fn a_frame_that_announces_too_much_ends_its_connection_before_anything_is_read() {
    let host = host(2);
    let start = Instant::now();
    for num_bytes in [u32::MAX, 1 << 21] {
        let mut stream = rogue(&host);
        stream.write_all(&num_bytes.to_le_bytes()).unwrap();
        closes(stream);
    }
    assert!(start.elapsed() < PROMPT, "it waited for the rest");
    // In bounds as a frame, but not as a key.
    let mut stream = rogue(&host);
    let mut payload = vec![0, 0, 8, 0, 0];
    payload.resize(5 + 2048, b'k');
    payload.extend([0; 4]);
    stream.write_all(&(payload.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(&payload).unwrap();
    closes(stream);
    assert!(matches!(host.wait(&["k"], Duration::ZERO), Err(StoreError::Timeout { .. })));
    still_serves(&host);
}

#[test]
fn a_rank_that_asks_and_does_not_read_keeps_nobody_from_closing_the_store() {
    let host = host(2);
    host.set("large", &vec![1; 1 << 20]).unwrap();
    let mut stream = rogue(&host);
    // Get "large", without end; the host is stuck once the buffers between are full.
    let mut request = vec![18, 0, 0, 0, 1];
    request.extend(1000u64.to_le_bytes());
    request.extend([5, 0, 0, 0]);
    request.extend(b"large");
    for _ in 0..64 {
        stream.write_all(&request).unwrap();
    }
    thread::sleep(Duration::from_millis(200));
    still_serves(&host);
    let start = Instant::now();
    drop(host);
    assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn garbage_is_survived(
        garbage in prop::collection::vec(any::<u8>(), 0..2000),
        known in 0usize..3,
        cut in any::<prop::sample::Index>(),
    ) {
        let host = host(2);
        let sent = match known {
            // From the first byte on.
            0 => garbage,
            // In a hello.
            1 => {
                let mut bytes = hello(b"bonfire\n", 1, b"campfire");
                let at = cut.index(bytes.len());
                bytes.truncate(at);
                bytes.extend(garbage);
                bytes
            }
            // Behind a hello that lets it in.
            _ => [hello(b"bonfire\n", 1, b"campfire"), garbage].concat(),
        };
        let mut stream = stranger(&host);
        // The host may hang up at any byte.
        drop(stream.write_all(&sent));
        drop(stream.shutdown(Shutdown::Write));
        closes(stream);
        still_serves(&host);
    }

    #[test]
    fn frames_of_garbage_are_survived(
        frames in prop::collection::vec((0u8..6, prop::collection::vec(any::<u8>(), 0..60)), 1..8),
    ) {
        let host = host(2);
        let mut stream = rogue(&host);
        for (kind, mut payload) in frames {
            // A timeout, where the kind has one, that ends.
            if matches!(kind, 1 | 3) && payload.len() >= 8 {
                payload[2..8].fill(0);
                payload[1] = 0;
            }
            let mut frame = (1 + payload.len() as u32).to_le_bytes().to_vec();
            frame.push(kind);
            frame.extend(payload);
            drop(stream.write_all(&frame));
        }
        drop(stream.shutdown(Shutdown::Write));
        closes(stream);
        still_serves(&host);
    }
}
