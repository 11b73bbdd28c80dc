//! Ranks connected by TCP: threads of this process with real sockets on the loopback device.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    num::NonZeroUsize,
    ops::ControlFlow,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{
    BufferMut, CollectiveError, Communicator, DType, Incoming, Meeting, MemoryStore, Outgoing, ProcessGroupError,
    ReduceOp, Refusal, Store, TcpCommunicator, TcpTransport, Token, Transport, TransportError, Watch,
    conformance::{self, BREAKING, RESULTS},
};
use proptest::prelude::*;

type Program<'a> = &'a (dyn Fn(&dyn Communicator) + Sync);

const TIMEOUT: Duration = Duration::from_secs(10);
const HOST: &str = "127.0.0.1";

fn ranks(world_size: usize) -> NonZeroUsize {
    NonZeroUsize::new(world_size).expect("a group has ranks")
}

fn token() -> Token {
    Token::new("campfire").expect("it is short")
}

fn meeting(rank: usize, world_size: usize, timeout: Duration) -> Meeting<'static> {
    Meeting { name: "test", rank, world_size: ranks(world_size), timeout }
}

fn join(store: &MemoryStore, rank: usize, world_size: usize, timeout: Duration) -> TcpCommunicator {
    let transport = TcpTransport::connect(store, &meeting(rank, world_size, TIMEOUT), &token(), HOST);
    TcpCommunicator::new(transport.unwrap(), timeout)
}

/// Runs a program as every rank, and gives the results by rank.
fn run<R: Send>(world_size: usize, timeout: Duration, program: impl Fn(TcpCommunicator) -> R + Sync) -> Vec<R> {
    let (store, program) = (MemoryStore::new(), &program);
    thread::scope(|scope| {
        let rank = |rank| {
            let store = store.clone();
            move || program(join(&store, rank, world_size, timeout))
        };
        let threads: Vec<_> = (0..world_size).map(|index| scope.spawn(rank(index))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
    })
}

fn connected(world_size: NonZeroUsize, timeout: Duration, program: Program<'_>) {
    run(world_size.get(), timeout, |communicator| program(&communicator));
}

#[test]
fn sockets_give_the_sequential_results() {
    for world_size in 1..=4 {
        conformance::run(RESULTS, ranks(world_size), &connected);
    }
}

#[test]
fn sockets_break_on_every_rank() {
    for world_size in 1..=4 {
        conformance::run(BREAKING, ranks(world_size), &connected);
    }
}

/// Strangers that keep at it while ranks connect.
fn pester(address: &str, num_strangers: usize) -> Vec<TcpStream> {
    let garbage: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", b"", b"bonfire-", &[0xA5; 4096]];
    let stranger = |index: usize| {
        let mut stream = TcpStream::connect(address).ok()?;
        // It may be turned away before it is done.
        let _ = stream.write_all(garbage[index % garbage.len()]);
        Some(stream)
    };
    (0..num_strangers).filter_map(stranger).collect()
}

#[test]
fn garbage_on_the_ports_keeps_no_rank_out() {
    let store = MemoryStore::new();
    let zero = thread::spawn({
        let store = store.clone();
        move || join(&store, 0, 2, TIMEOUT).barrier()
    });
    let address = String::from_utf8(store.get("mesh/test/address/0", TIMEOUT).unwrap()).unwrap();
    let strangers = pester(&address, 300);
    assert!(strangers.len() > 200, "{} strangers got through", strangers.len());
    let started = Instant::now();
    join(&store, 1, 2, TIMEOUT).barrier().unwrap();
    zero.join().unwrap().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn a_rank_with_another_token_is_turned_away_and_the_right_one_let_in() {
    let store = MemoryStore::new();
    let zero = thread::spawn({
        let store = store.clone();
        move || join(&store, 0, 2, TIMEOUT).barrier()
    });
    let address = store.get("mesh/test/address/0", TIMEOUT).unwrap();
    // An impostor who has found the port, but not the token.
    let other = MemoryStore::new();
    other.set("mesh/test/address/0", &address).unwrap();
    let stranger = TcpTransport::connect(&other, &meeting(1, 2, TIMEOUT), &Token::new("ash").unwrap(), HOST);
    let Err(ProcessGroupError::Refused { rank: 1, other: 0, refusal, .. }) = stranger else {
        panic!("another token, but let in")
    };
    assert_eq!(refusal, Refusal::Token);
    join(&store, 1, 2, TIMEOUT).barrier().unwrap();
    zero.join().unwrap().unwrap();
}

#[test]
fn something_else_behind_a_port_is_an_error_that_shows_the_address() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let store = MemoryStore::new();
    store.set("mesh/test/address/0", address.as_bytes()).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let error = TcpTransport::connect(&store, &meeting(1, 2, TIMEOUT), &token(), HOST).err().unwrap();
    assert!(error.to_string().contains(&address), "{error}");
    assert!(matches!(error, ProcessGroupError::Refused { refusal: Refusal::NotAStore, .. }), "{error}");
    server.join().unwrap();
}

#[test]
fn a_rank_that_ends_before_it_lets_others_in_is_missing() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let store = MemoryStore::new();
    store.set("mesh/test/address/0", listener.local_addr().unwrap().to_string().as_bytes()).unwrap();
    let zero = thread::spawn(move || drop(listener.accept().unwrap()));
    let error = TcpTransport::connect(&store, &meeting(1, 2, TIMEOUT), &token(), HOST).err().unwrap();
    assert!(matches!(&error, ProcessGroupError::Missing { missing, .. } if *missing == [0]), "{error}");
    zero.join().unwrap();
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let store = MemoryStore::new();
    let timeout = Duration::from_millis(200);
    let come = |rank: usize| {
        let store = store.clone();
        move || TcpTransport::connect(&store, &meeting(rank, 3, timeout), &token(), HOST).err().unwrap()
    };
    let ranks = [thread::spawn(come(0)), thread::spawn(come(2))];
    for rank in ranks {
        let error = rank.join().unwrap();
        assert!(matches!(&error, ProcessGroupError::Missing { missing, .. } if missing.contains(&1)), "{error}");
    }
}

#[test]
fn a_name_is_used_once() {
    let store = MemoryStore::new();
    drop(join(&store, 0, 1, TIMEOUT));
    let again = TcpTransport::connect(&store, &meeting(0, 1, TIMEOUT), &token(), HOST);
    assert!(matches!(again, Err(ProcessGroupError::NameTaken { rank: 0, .. })));
}

#[test]
fn a_rank_lost_in_the_middle_of_large_data_is_named() {
    let results = run(3, TIMEOUT, |communicator| {
        let mut values = vec![1f32; 4_000_000];
        if communicator.rank() == 2 {
            // It meets the others, and is gone before its data.
            communicator.barrier().unwrap();
            return None;
        }
        let started = Instant::now();
        // A rank that is slow to leave the barrier may learn there already what the other one has found.
        let result = communicator
            .barrier()
            .and_then(|()| communicator.all_reduce(BufferMut::from_slice(&mut values), ReduceOp::Sum));
        let error = result.unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
        Some(error)
    });
    for error in results.into_iter().flatten() {
        let CollectiveError::Broken { cause, .. } = error else { panic!("rank 2 has ended: {error}") };
        assert!(matches!(*cause, CollectiveError::RankEnded { rank: 2, num_calls: 1, panicked: false, .. }), "{cause}");
    }
}

#[test]
fn an_abort_wakes_a_rank_in_the_middle_of_a_call() {
    let results = run(2, Duration::from_secs(60), |communicator| {
        if communicator.rank() == 1 {
            thread::sleep(Duration::from_millis(50));
            communicator.abort("out of memory");
            return None;
        }
        let started = Instant::now();
        let error = communicator.all_reduce(BufferMut::from_slice(&mut vec![0u8; 1 << 20]), ReduceOp::Sum).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(3));
        Some(error)
    });
    let error = results[0].as_ref().unwrap().to_string();
    assert!(error.contains("rank 1 of 2 aborted the group: out of memory"), "{error}");
}

/// Stops at the first notice, and at a time.
struct Stop<'a> {
    at: Instant,
    before: &'a dyn Fn(),
    notices: Vec<Vec<u8>>,
}

impl Watch for Stop<'_> {
    fn notice(&mut self, _: usize, notice: &[u8]) -> ControlFlow<()> {
        self.notices.push(notice.to_vec());
        ControlFlow::Break(())
    }

    fn arrived(&mut self, _: usize, _: &[u8]) {}

    fn tick(&mut self) -> ControlFlow<()> {
        if Instant::now() < self.at {
            return ControlFlow::Continue(());
        }
        (self.before)();
        ControlFlow::Break(())
    }
}

#[test]
fn a_notice_behind_a_message_that_was_cut_comes_through() {
    const NUM_BYTES: usize = 64 << 20;
    let store = &MemoryStore::new();
    let connect = |rank| TcpTransport::connect(store, &meeting(rank, 2, TIMEOUT), &token(), HOST).unwrap();
    let (stopping, is_stopping) = mpsc::channel();
    let (finishing, is_finishing) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let zero = connect(0);
            // Nobody takes the message, and another thread aborts.
            let before = || {
                zero.notify(1, b"why");
                stopping.send(()).unwrap();
            };
            let at = Instant::now() + Duration::from_millis(100);
            let mut watch = Stop { at, before: &before, notices: Vec::new() };
            let message = vec![1; NUM_BYTES];
            let stopped = zero.exchange(&mut [Outgoing::new(1, &message)], &mut [], at + TIMEOUT, &mut watch);
            assert_eq!(stopped, Err(TransportError::Stopped));
            // It lives on, and makes no more calls.
            is_finishing.recv().unwrap();
        });
        let one = connect(1);
        is_stopping.recv().unwrap();
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut watch = Stop { at: deadline + TIMEOUT, before: &|| {}, notices: Vec::new() };
        let mut room = vec![0; NUM_BYTES];
        let result = one.exchange(&mut [], &mut [Incoming::new(0, &mut room)], deadline, &mut watch);
        finishing.send(()).unwrap();
        assert_eq!((result, watch.notices), (Err(TransportError::Stopped), vec![b"why".to_vec()]));
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn sockets_carry_any_list(
        world_size in 2usize..=4,
        seed: u64,
        list in prop::collection::vec(
            (prop::sample::select(DType::ALL.to_vec()), prop_oneof![0usize..200, 0usize..1_000_000]), 0..4,
        ),
    ) {
        let list: Vec<_> = list.into_iter().filter(|&(dtype, _)| ReduceOp::Sum.supports(dtype)).collect();
        run(world_size, TIMEOUT, |communicator| {
            conformance::all_reduce_case(&communicator, seed, &list, ReduceOp::Sum);
            if let Some(&(dtype, length)) = list.first() {
                let lengths: Vec<usize> = (0..world_size).map(|rank| length / (rank + 1)).collect();
                conformance::all_gather_case(&communicator, seed, dtype, &lengths);
                conformance::reduce_scatter_case(&communicator, seed, dtype, &lengths, ReduceOp::Sum);
                conformance::broadcast_case(&communicator, seed, dtype, length, world_size - 1);
                conformance::transfer_case(&communicator, seed, dtype, length, (0, 1));
            }
        });
    }
}
