//! Ranks that meet: of one run, of different ones, and too few.

use std::{
    num::NonZeroUsize,
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{Configuration, Meeting, MemoryStore, Store, StoreError, TcpStore, Token, rendezvous};

/// No test comes near it: an error that only the timeout brings shows.
const TIMEOUT: Duration = Duration::from_secs(20);
const PROMPT: Duration = Duration::from_secs(8);
const SHORT: Duration = Duration::from_millis(800);

/// What one rank comes with.
#[derive(Clone)]
struct Comes {
    rank: usize,
    world_size: usize,
    configuration: Configuration,
    timeout: Duration,
}

fn comes(rank: usize, world_size: usize) -> Comes {
    let configuration = Configuration::new().with("seed", 7).with("learning_rate", 0.1);
    Comes { rank, world_size, configuration, timeout: TIMEOUT }
}

fn meet(store: &dyn Store, name: &str, comes: &Comes) -> Result<(), StoreError> {
    let world_size = NonZeroUsize::new(comes.world_size).unwrap();
    let meeting = Meeting { name, rank: comes.rank, world_size, timeout: comes.timeout };
    rendezvous(store, &meeting, &comes.configuration)
}

/// All come at once, each with a handle that it drops as soon as it is done; over each kind of store.
fn on_each(all: &[Comes], check: impl Fn(Vec<Result<(), StoreError>>)) {
    let store = MemoryStore::new();
    let memory: Vec<_> = all.iter().map(|_| store.clone()).collect();
    check(run(all, memory));

    let token = Token::default();
    let world_size = NonZeroUsize::new(all[0].world_size).unwrap();
    let host = TcpStore::host("127.0.0.1", 0, token.clone(), world_size).unwrap();
    let port = host.port();
    let connect = |comes: &Comes| match comes.rank {
        0 => host.clone(),
        rank => TcpStore::connect("127.0.0.1", port, token.clone(), rank, TIMEOUT).unwrap(),
    };
    let tcp: Vec<_> = all.iter().map(connect).collect();
    if all.iter().any(|comes| comes.rank == 0) && all.iter().all(|comes| comes.rank < world_size.get()) {
        // Rank 0's own handle is the last: the store goes with it. Of a rank too many it knows nothing.
        drop(host);
    }
    check(run(all, tcp));
}

fn run<S: Store>(all: &[Comes], stores: Vec<S>) -> Vec<Result<(), StoreError>> {
    thread::scope(|scope| {
        let start = |(comes, store)| scope.spawn(move || meet(&store, "start", comes));
        let threads: Vec<_> = all.iter().zip(stores).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Each rank says the same, which has all `parts` and the rank's own number.
fn all_say(results: Vec<Result<(), StoreError>>, all: &[Comes], parts: &[&str]) {
    for (result, comes) in results.into_iter().zip(all) {
        let message = result.expect_err("it must be refused").to_string();
        let own = format!("rank {} of {}", comes.rank, comes.world_size);
        for part in parts.iter().chain([&own.as_str()]) {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
}

#[test]
fn ranks_of_one_run_meet() {
    for world_size in [1, 2, 3, 8] {
        let all: Vec<_> = (0..world_size).map(|rank| comes(rank, world_size)).collect();
        on_each(&all, |results| assert!(results.iter().all(Result::is_ok), "{results:?}"));
    }
}

#[test]
fn what_differs_is_named_on_every_rank() {
    let mut all: Vec<_> = (0..4).map(|rank| comes(rank, 4)).collect();
    for rank in [2, 3] {
        all[rank].configuration = all[rank].configuration.clone().with("learning_rate", 0.2);
    }
    all[3].configuration = all[3].configuration.clone().with("amp", true);
    on_each(&all, |results| {
        let start = Instant::now();
        all_say(
            results,
            &all,
            &[
                r#"learning_rate is "0.1" on rank 0, "0.2" on ranks [2, 3]"#,
                r#"amp is not given on rank 0, "true" on rank 3"#,
                "same settings",
            ],
        );
        assert!(start.elapsed() < PROMPT);
    });
}

#[test]
fn another_number_of_ranks_is_named_on_every_rank_that_came_without_waiting_for_more() {
    // Rank 0 expects more than there are, and fewer.
    for (own, others) in [(5, 2), (2, 5)] {
        let all: Vec<_> = (0..2).map(|rank| comes(rank, if rank == 0 { own } else { others })).collect();
        let part = format!(r#"world_size is "{own}" on rank 0, "{others}" on rank 1"#);
        let start = Instant::now();
        on_each(&all, |results| all_say(results, &all, &[&part]));
        assert!(start.elapsed() < PROMPT);
    }
    // A rank that rank 0 knows nothing of finds out by itself.
    let all = [comes(0, 2), comes(1, 2), comes(2, 3)];
    on_each(&all, |results| {
        assert!(results[0].is_ok() && results[1].is_ok());
        all_say(results[2..].to_vec(), &all[2..], &[r#"world_size is "2" on rank 0, "3" on rank 2"#]);
    });
}

#[test]
fn ranks_that_do_not_come_are_named_on_every_rank() {
    let mut all = [comes(0, 4), comes(2, 4)];
    for (early, late) in [(0, 1), (1, 0)] {
        all[early].timeout = SHORT;
        all[late].timeout = SHORT + Duration::from_millis(500);
        on_each(&all, |results| {
            for (result, comes) in results.into_iter().zip(&all) {
                let error = result.expect_err("two are missing");
                let StoreError::RanksMissing { rank, missing, name, .. } = &error else { panic!("{error}") };
                assert_eq!((*rank, name.as_str(), missing.as_slice()), (comes.rank, "start", &[1, 3][..]));
            }
        });
    }
}

#[test]
fn rank_0_that_does_not_come_is_named() {
    let all = [1, 2].map(|rank| Comes { timeout: SHORT, ..comes(rank, 3) });
    on_each(&all, |results| all_say(results, &all, &["rank 0 did not come"]));
}

#[test]
fn two_processes_of_one_rank_are_named() {
    let store = MemoryStore::new();
    let second = Comes { timeout: SHORT, ..comes(1, 3) };
    thread::scope(|scope| {
        let first = scope.spawn(|| meet(&store, "start", &comes(1, 3)));
        // The first has come once it has counted itself.
        store.wait(&["rendezvous/start/count/1"], TIMEOUT).unwrap();
        let message = meet(&store, "start", &second).unwrap_err().to_string();
        assert!(message.contains("rank 1 is the rank of several processes"), "{message}");
        let others = [0, 2].map(|rank| {
            let store = &store;
            scope.spawn(move || meet(store, "start", &comes(rank, 3)))
        });
        for thread in others.into_iter().chain([first]) {
            let message = thread.join().unwrap().unwrap_err().to_string();
            assert!(message.contains("rank 1 is the rank of several processes"), "{message}");
        }
    });
}

#[test]
fn a_name_serves_once_and_another_serves_again() {
    let store = MemoryStore::new();
    meet(&store, "start", &comes(0, 1)).unwrap();
    meet(&store, "end", &comes(0, 1)).unwrap();
    let message = meet(&store, "start", &comes(0, 1)).unwrap_err().to_string();
    assert!(message.contains("met under this name before"), "{message}");
    let message = meet(&store, "odd", &comes(3, 2)).unwrap_err().to_string();
    assert!(message.contains("rank 3 is not below the world size of 2"), "{message}");
}
