//! Process groups of one process: alone, of threads, and of threads that take themselves for processes.

use std::{
    net::TcpListener,
    num::NonZeroUsize,
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{
    BufferMut, CollectiveError, GroupBackend, LaunchOptions, ProcessGroup, ProcessGroupError, ProcessGroupOptions,
    ReduceOp, StoreError, run_groups,
};

const TIMEOUT: Duration = Duration::from_secs(10);

fn launch(rank: usize, world_size: usize, port: u16) -> LaunchOptions {
    LaunchOptions {
        rank: Some(rank),
        local_rank: Some(rank),
        world_size: Some(world_size),
        address: Some("127.0.0.1".into()),
        port: Some(port),
        token: None,
    }
}

fn options(rank: usize, world_size: usize, port: u16) -> ProcessGroupOptions {
    ProcessGroupOptions::default()
        .with_launch(launch(rank, world_size, port))
        .with_backend(GroupBackend::Tcp)
        .with_timeout(TIMEOUT)
        .with_rendezvous_timeout(TIMEOUT)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn two() -> NonZeroUsize {
    NonZeroUsize::new(2).unwrap()
}

/// What any group must do.
fn exercise(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let (main, norm) = (group.communicator(), group.new_communicator("norm").unwrap());
    assert!(matches!(group.new_communicator("norm"), Err(ProcessGroupError::NameTaken { rank: of, .. }) if of == rank));
    let sum = |communicator: &dyn bonfire_collectives::Communicator| {
        let mut value = [rank as i64 + 1];
        communicator.all_reduce(BufferMut::from_slice(&mut value), ReduceOp::Sum).unwrap();
        assert_eq!(value, [(world_size * (world_size + 1) / 2) as i64]);
    };
    // Neither knows of the order of the other's collectives.
    thread::scope(|scope| {
        scope.spawn(|| (0..50).for_each(|_| sum(&*norm)));
        (0..50).for_each(|_| sum(&*main));
    });
    let store = group.store();
    store.set(&format!("rank {rank}"), &[rank as u8]).unwrap();
    for other in 0..world_size {
        assert_eq!(store.get(&format!("rank {other}"), TIMEOUT).unwrap(), [other as u8]);
    }
    main.barrier().unwrap();
}

#[test]
fn a_single_rank_takes_the_same_path() {
    let groups = [ProcessGroup::single().unwrap(), ProcessGroup::single().unwrap()];
    for group in groups {
        assert_eq!((group.rank(), group.local_rank(), group.world_size()), (0, 0, 1));
        exercise(&group);
    }
}

#[test]
fn threads_have_groups_as_processes_do() {
    let ranks = run_groups(NonZeroUsize::new(3).unwrap(), TIMEOUT, |group| {
        exercise(&group);
        (group.rank(), group.local_rank())
    });
    assert_eq!(ranks, [(0, 0), (1, 1), (2, 2)]);
}

#[test]
#[should_panic(expected = "a bug on rank 1")]
fn the_panic_of_a_rank_is_the_one_that_shows() {
    run_groups(two(), TIMEOUT, |group| {
        assert_ne!(group.rank(), 1, "a bug on rank 1");
        group.communicator().barrier().unwrap();
    });
}

#[test]
fn ranks_meet_by_explicit_options() {
    let port = free_port();
    thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || exercise(&ProcessGroup::new(&options(rank, 3, port)).unwrap()));
        }
    });
}

#[test]
fn a_group_that_is_dropped_is_missed_by_the_others() {
    let port = free_port();
    let one = thread::spawn(move || drop(ProcessGroup::new(&options(1, 2, port)).unwrap()));
    let group = ProcessGroup::new(&options(0, 2, port)).unwrap();
    one.join().unwrap();
    let started = Instant::now();
    let Err(CollectiveError::Broken { cause, .. }) = group.communicator().barrier() else { panic!("rank 1 is gone") };
    assert!(matches!(*cause, CollectiveError::RankEnded { rank: 1, .. }), "{cause}");
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_further_communicator_does_not_wait_for_a_rank_that_has_ended() {
    let port = free_port();
    let one = thread::spawn(move || drop(ProcessGroup::new(&options(1, 2, port)).unwrap()));
    let group = ProcessGroup::new(&options(0, 2, port)).unwrap();
    one.join().unwrap();
    let started = Instant::now();
    let error = group.new_communicator("norm").err().unwrap().to_string();
    assert!(error.contains("rank 1 of 2 ended"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
}

/// CASES 38
#[test]
fn a_busy_port_is_an_error_that_shows_the_address() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = ProcessGroup::new(&options(0, 2, port)).unwrap_err();
    assert!(matches!(error, ProcessGroupError::Store(StoreError::PortInUse { .. })), "{error}");
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
}

#[test]
fn a_host_that_no_rank_could_find_is_an_error_at_once() {
    let port = free_port();
    let other = thread::spawn(move || {
        ProcessGroup::new(&options(1, 2, port).with_rendezvous_timeout(Duration::from_secs(1))).is_err()
    });
    let error = ProcessGroup::new(&options(0, 2, port).with_host("no.such.host.invalid")).unwrap_err().to_string();
    assert!(error.contains("no.such.host.invalid"), "{error}");
    assert!(other.join().unwrap());
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let options = options(0, 2, free_port()).with_rendezvous_timeout(Duration::from_millis(200));
    let error = ProcessGroup::new(&options).unwrap_err();
    assert!(
        matches!(&error, ProcessGroupError::Store(StoreError::RanksMissing { missing, .. }) if *missing == [1]),
        "{error}"
    );
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_backend_that_was_not_built_is_refused() {
    let error = ProcessGroup::new(&options(0, 1, 0).with_backend(GroupBackend::Mpi)).unwrap_err();
    assert!(error.to_string().contains("feature `mpi`"), "{error}");
}

#[cfg(feature = "serde")]
#[test]
fn options_are_read_and_written() {
    let text = r#"{"launch": {"world_size": 1}, "backend": "tcp", "timeout_seconds": 5}"#;
    let read: ProcessGroupOptions = serde_json::from_str(text).unwrap();
    assert_eq!((read.timeout, read.backend), (Duration::from_secs(5), GroupBackend::Tcp));
    assert_eq!(read.launch.world_size, Some(1));
    let again: ProcessGroupOptions = serde_json::from_str(&serde_json::to_string(&read).unwrap()).unwrap();
    assert_eq!(again, read);
    for wrong in [r#"{"timout": 5}"#, r#"{"timeout_seconds": 0}"#, r#"{"rendezvous_timeout_seconds": -1}"#] {
        assert!(serde_json::from_str::<ProcessGroupOptions>(wrong).is_err(), "{wrong}");
    }
}
