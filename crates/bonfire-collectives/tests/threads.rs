//! What is particular to ranks that are threads: shared results, ranks that end or panic, races.

use std::{
    num::NonZeroUsize,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{
    Buffer, BufferMut, Collective, CollectiveError, Communicator, Counting, DType, ReduceOp, ThreadCommunicator,
    conformance::oracle::{self, Random, assert_same},
    run_ranks,
};

/// No test comes near it: an error that only the timeout brings shows.
const TIMEOUT: Duration = Duration::from_secs(9);
const PROMPT: Duration = Duration::from_secs(4);

fn ranks(world_size: usize) -> NonZeroUsize {
    NonZeroUsize::new(world_size).expect("a group has ranks")
}

fn all_reduce(communicator: &ThreadCommunicator, values: &mut [f32]) -> Result<(), CollectiveError> {
    communicator.all_reduce(BufferMut::from_slice(values), ReduceOp::Sum)
}

#[test]
fn a_shared_result_is_the_same_memory_on_all_ranks() {
    for world_size in [1, 2, 3, 4, 8] {
        for num_elements in [0, 1, 1000, 30_003] {
            let list = [(DType::F32, num_elements), (DType::BF16, 3 * num_elements), (DType::F64, 5)];
            let dtypes = list.map(|(dtype, _)| dtype);
            let given =
                |rank: usize| list.map(|(dtype, num_elements)| oracle::values(1, rank, dtype, num_elements)).to_vec();
            let results = run_ranks(ranks(world_size), TIMEOUT, |communicator| {
                let buffers = given(communicator.rank());
                let starts: Vec<_> = buffers.iter().map(|buffer| buffer.as_ptr() as usize).collect();
                (starts, communicator.all_reduce_shared(buffers, &dtypes, ReduceOp::Mean).unwrap())
            });
            let (starts, first) = &results[0];
            for (index, &dtype) in dtypes.iter().enumerate() {
                let of_ranks: Vec<_> = (0..world_size).map(|rank| given(rank).swap_remove(index)).collect();
                let expected = oracle::reduce(dtype, ReduceOp::Mean, &of_ranks);
                assert_same("all_reduce_shared", dtype, &first[index], &expected);
                assert_eq!(first[index].as_ptr() as usize, starts[index], "rank 0's memory");
                assert!(results.iter().all(|(_, result)| Arc::ptr_eq(&result[index], &first[index])));
                assert_eq!(Arc::strong_count(&first[index]), world_size, "nobody else keeps it");
            }
        }
    }
}

#[test]
fn shared_buffers_may_hold_their_bytes_in_themselves() {
    struct Inline([u8; 8]);
    impl std::ops::Deref for Inline {
        type Target = [u8];
        fn deref(&self) -> &[u8] {
            &self.0
        }
    }
    impl std::ops::DerefMut for Inline {
        fn deref_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }
    let results = run_ranks(ranks(3), TIMEOUT, |communicator| {
        let buffer = Inline((communicator.rank() as u64 + 1).to_ne_bytes());
        communicator.all_reduce_shared(vec![buffer], &[DType::U64], ReduceOp::Sum).unwrap()
    });
    assert!(results.iter().all(|result| result[0].0 == 6u64.to_ne_bytes()));
}

#[test]
fn shared_buffers_of_other_ranks_are_dropped_before_the_call_returns() {
    struct Tracked(Vec<u8>, Arc<AtomicUsize>);
    impl std::ops::Deref for Tracked {
        type Target = [u8];
        fn deref(&self) -> &[u8] {
            &self.0
        }
    }
    impl std::ops::DerefMut for Tracked {
        fn deref_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }
    impl Drop for Tracked {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }
    for num_bytes in [16, 1 << 20] {
        let results = run_ranks(ranks(3), TIMEOUT, |communicator| {
            let num_dropped = Arc::new(AtomicUsize::new(0));
            let buffer = Tracked(vec![1; num_bytes], num_dropped.clone());
            let result = communicator.all_reduce_shared(vec![buffer], &[DType::U8], ReduceOp::Sum).unwrap();
            (result, num_dropped.load(Ordering::SeqCst), num_dropped)
        });
        assert_eq!(results.iter().map(|result| result.1).collect::<Vec<_>>(), [0, 1, 1]);
        let num_dropped = results[0].2.clone();
        drop(results);
        assert_eq!(num_dropped.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn shared_buffers_of_different_types_are_a_mismatch() {
    let results = run_ranks(ranks(2), TIMEOUT, |communicator| {
        if communicator.rank() == 0 {
            communicator.all_reduce_shared(vec![vec![0u8; 4]], &[DType::F32], ReduceOp::Sum).err()
        } else {
            let boxed = vec![0u8; 4].into_boxed_slice();
            communicator.all_reduce_shared(vec![boxed], &[DType::F32], ReduceOp::Sum).err()
        }
    });
    assert!(results.iter().all(|error| matches!(error, Some(CollectiveError::Mismatch { differing: 1, .. }))));
}

#[test]
fn a_shared_and_a_plain_all_reduce_are_a_mismatch() {
    let results = run_ranks(ranks(2), TIMEOUT, |communicator| {
        if communicator.rank() == 0 {
            all_reduce(&communicator, &mut [0.0]).err()
        } else {
            communicator.all_reduce_shared(vec![vec![0u8; 4]], &[DType::F32], ReduceOp::Sum).err()
        }
    });
    assert!(results.iter().all(|error| matches!(error, Some(CollectiveError::Mismatch { differing: 1, .. }))));
}

#[test]
fn wrong_shared_arguments_are_refused_on_every_rank() {
    let refused = |dtypes: &'static [DType]| {
        run_ranks(ranks(2), TIMEOUT, move |communicator| {
            communicator.all_reduce_shared(vec![vec![0u8; 6]], dtypes, ReduceOp::Sum).unwrap_err()
        })
    };
    for error in refused(&[DType::F32]) {
        assert_eq!(error, CollectiveError::PartialElement { dtype: DType::F32, num_bytes: 6 });
    }
    for error in refused(&[DType::F16, DType::F16]) {
        assert!(matches!(error, CollectiveError::WrongLength { actual: 2, expected: 1, .. }));
    }
}

#[test]
fn an_exchange_gives_every_rank_every_pointer() {
    for world_size in [1, 2, 4, 8] {
        let results = run_ranks(ranks(world_size), TIMEOUT, |communicator| {
            let value = Arc::new(format!("rank {}", communicator.rank()));
            communicator.exchange("names", value.len(), value).unwrap()
        });
        for result in &results {
            for (rank, value) in result.iter().enumerate() {
                assert_eq!(**value, format!("rank {rank}"));
                assert!(Arc::ptr_eq(value, &results[0][rank]));
                assert_eq!(Arc::strong_count(value), world_size);
            }
        }
    }
}

#[test]
fn an_exchange_of_another_name_or_type_is_a_mismatch() {
    let other_name = run_ranks(ranks(2), TIMEOUT, |communicator| {
        let name = ["weights", "gradients"][communicator.rank()];
        communicator.exchange(name, 0, Arc::new(1)).unwrap_err()
    });
    let other_type = run_ranks(ranks(2), TIMEOUT, |communicator| {
        if communicator.rank() == 0 {
            communicator.exchange("weights", 0, Arc::new(1u8)).unwrap_err()
        } else {
            communicator.exchange("weights", 0, Arc::new(1i8)).unwrap_err()
        }
    });
    for error in other_name.iter().chain(&other_type) {
        assert!(matches!(error, CollectiveError::Mismatch { differing: 1, .. }), "{error}");
    }
}

#[test]
fn a_rank_that_ends_breaks_those_who_wait_for_it_at_once() {
    let results = run_ranks(ranks(3), TIMEOUT, |communicator| {
        all_reduce(&communicator, &mut [1.0]).unwrap();
        if communicator.rank() == 1 {
            thread::sleep(Duration::from_millis(20));
            return None;
        }
        let started = Instant::now();
        let error = all_reduce(&communicator, &mut [1.0]).unwrap_err();
        assert!(started.elapsed() < PROMPT);
        Some((error, communicator.barrier().unwrap_err()))
    });
    let ended = CollectiveError::RankEnded { rank: 1, world_size: 3, num_calls: 1, panicked: false };
    for (rank, result) in results.into_iter().enumerate() {
        let Some((error, later)) = result else { continue };
        let broken =
            |collective| CollectiveError::Broken { rank, world_size: 3, collective, cause: Arc::new(ended.clone()) };
        assert_eq!((error, later), (broken(Collective::AllReduce), broken(Collective::Barrier)));
    }
}

#[test]
fn a_rank_that_ends_after_its_last_collective_does_not_spoil_it() {
    for round in 0..300 {
        run_ranks(ranks(2 + round % 3), TIMEOUT, |communicator| {
            let mut values = vec![1.0; if round % 2 == 0 { 1 } else { 100_000 }];
            all_reduce(&communicator, &mut values).unwrap();
        });
    }
}

#[test]
fn the_panic_that_broke_the_group_is_the_one_that_is_passed_on() {
    for _ in 0..50 {
        let payload = panic::catch_unwind(|| {
            run_ranks(ranks(4), TIMEOUT, |communicator| {
                if communicator.rank() == 2 {
                    panic::resume_unwind(Box::new("rank 2 has no memory left"));
                }
                if let Err(error) = communicator.barrier() {
                    panic::resume_unwind(Box::new(error));
                }
            })
        })
        .unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"rank 2 has no memory left"));
    }
}

#[test]
fn a_rank_that_panics_is_named_on_every_other_rank() {
    let results = run_ranks(ranks(3), TIMEOUT, |communicator| {
        let rank = communicator.rank();
        if rank == 0 {
            let caught = panic::catch_unwind(AssertUnwindSafe(move || {
                let _owned = communicator;
                panic::resume_unwind(Box::new("out of memory"));
            }));
            assert!(caught.is_err());
            return None;
        }
        Some(communicator.barrier().unwrap_err())
    });
    for error in results.into_iter().flatten() {
        let CollectiveError::Broken { cause, .. } = error else { panic!("must be broken: {error}") };
        assert_eq!(*cause, CollectiveError::RankEnded { rank: 0, world_size: 3, num_calls: 0, panicked: true });
        assert_eq!(cause.to_string(), "rank 0 of 3 panicked after 0 calls");
    }
}

#[test]
fn a_rank_refused_for_its_arguments_breaks_the_others_at_once() {
    let started = Instant::now();
    let errors = run_ranks(ranks(2), TIMEOUT, |communicator| {
        let dtype = [DType::I32, DType::F32][communicator.rank()];
        let mut bytes = [0; 4];
        communicator.all_reduce(BufferMut::new(dtype, &mut bytes).unwrap(), ReduceOp::Mean).unwrap_err()
    });
    assert!(started.elapsed() < PROMPT);
    assert!(matches!(errors[0], CollectiveError::UnsupportedReduction { rank: 0, .. }));
    let CollectiveError::Broken { rank: 1, cause, .. } = &errors[1] else { panic!("{}", errors[1]) };
    assert_eq!(**cause, errors[0]);
}

#[test]
fn messages_name_the_ranks_the_operation_and_the_sizes() {
    let errors = run_ranks(ranks(2), TIMEOUT, |communicator| {
        all_reduce(&communicator, &mut vec![0.0; 2 + communicator.rank()]).unwrap_err()
    });
    assert_eq!(
        errors[0].to_string(),
        "rank 0 of 2: all_reduce does not match: rank 1 gave 3 f32 elements in buffer 0 of 1, \
         rank 0 gave 2 f32 elements in buffer 0 of 1; \
         all ranks must issue the same collectives in the same order"
    );
    let error = run_ranks(ranks(2), Duration::from_millis(30), |communicator| {
        if communicator.rank() == 1 {
            thread::sleep(Duration::from_millis(200));
            return None;
        }
        Some((communicator.broadcast(BufferMut::from_slice(&mut [1u8]), 0), communicator.barrier()))
    });
    let Some((Err(timeout), Err(later))) = &error[0] else { panic!("{error:?}") };
    let text = timeout.to_string();
    assert!(text.starts_with("rank 0 of 2: broadcast waited "), "{text}");
    assert!(text.contains("ranks [1] did not arrive"), "{text}");
    assert!(later.to_string().starts_with("rank 0 of 2: barrier refused"), "{later}");
    assert!(later.to_string().contains("ranks [1] did not arrive"), "{later}");
}

#[test]
fn a_withdrawn_buffer_is_never_touched_again() {
    // Ranks come around the moment the others give up. Whoever leaves with an error overwrites its buffer at
    // once: a rank still reading or writing it would show here, or under a sanitizer.
    let mut num_broken = 0;
    for round in 0..100u64 {
        let results = run_ranks(ranks(3), Duration::from_millis(2), |communicator| {
            let mut random = Random::new(round, communicator.rank());
            let mut values = vec![1.0f32; if round % 2 == 0 { 64 } else { 50_000 }];
            thread::sleep(Duration::from_micros(1_000 + random.below(2_000) as u64));
            let result = all_reduce(&communicator, &mut values);
            let value = if result.is_ok() { 3.0 } else { 1.0 };
            assert!(values.iter().all(|&v| v == value), "{result:?}");
            values.fill(7.0);
            thread::yield_now();
            assert!(values.iter().all(|&v| v == 7.0));
            result.is_ok()
        });
        assert!(results.iter().all(|&ok| ok == results[0]), "all ranks or none: {results:?}");
        num_broken += usize::from(!results[0]);
    }
    println!("{num_broken} of 100 groups broke");
}

#[test]
fn an_abort_in_the_middle_leaves_all_or_nothing() {
    for round in 0..100 {
        run_ranks(ranks(3), TIMEOUT, |communicator| {
            for step in 0..20 {
                if communicator.rank() == 2 && step == 10 {
                    communicator.abort("enough");
                }
                let mut values = vec![1.0f32; 1 + (round % 2) * 50_000];
                match all_reduce(&communicator, &mut values) {
                    Ok(()) => assert!(values.iter().all(|&value| value == 3.0)),
                    Err(CollectiveError::Broken { .. }) => {
                        assert!(step == 10 && values.iter().all(|&value| value == 1.0));
                        return;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            panic!("the abort came through");
        });
    }
}

#[test]
fn random_delays_change_no_result() {
    for world_size in [2, 3, 8] {
        run_ranks(ranks(world_size), TIMEOUT, |communicator| {
            let rank = communicator.rank();
            let mut own = Random::new(1, rank);
            let mut same = Random::new(2, 0);
            for _ in 0..120 {
                match own.below(20) {
                    0 => thread::sleep(Duration::from_micros(own.below(300) as u64)),
                    1..5 => thread::yield_now(),
                    _ => {}
                }
                let (what, seed) = (same.below(6), same.bits());
                let limit = if same.below(16) == 0 { 60_000 } else { 50 };
                let num_elements = same.below(limit);
                let (dtype, op, root) = (DType::F32, ReduceOp::Mean, same.below(world_size));
                let lengths: Vec<_> = (0..world_size).map(|_| same.below(1 + num_elements)).collect();
                use bonfire_collectives::conformance as c;
                match what {
                    0 => c::all_reduce_case(&communicator, seed, &[(dtype, num_elements)], op),
                    1 => c::reduce_scatter_case(&communicator, seed, dtype, &lengths, op),
                    2 => c::all_gather_case(&communicator, seed, dtype, &lengths),
                    3 => c::broadcast_case(&communicator, seed, dtype, num_elements, root),
                    4 => c::transfer_case(&communicator, seed, dtype, num_elements, (root, (root + 1) % world_size)),
                    _ => {
                        let given = |rank| oracle::values(seed, rank, dtype, num_elements);
                        let result = communicator.all_reduce_shared(vec![given(rank)], &[dtype], op).unwrap();
                        let all: Vec<_> = (0..world_size).map(given).collect();
                        assert_same("shared", dtype, &result[0], &oracle::reduce(dtype, op, &all));
                    }
                }
            }
        });
    }
}

#[test]
fn one_communicator_used_by_several_threads_makes_one_call_at_a_time() {
    run_ranks(ranks(2), TIMEOUT, |communicator| {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let mut value = [1.0];
                        all_reduce(&communicator, &mut value).unwrap();
                        assert_eq!(value, [2.0]);
                    }
                });
            }
        });
    });
}

#[test]
fn pairs_of_ranks_transfer_side_by_side() {
    let received = run_ranks(ranks(4), TIMEOUT, |communicator| {
        let rank = communicator.rank();
        let (partner, mut value) = (rank ^ 1, [0u32; 1]);
        for round in 0..100 {
            let sent = [round * 10 + rank as u32];
            if rank < partner {
                communicator.send(Buffer::from_slice(&sent), partner).unwrap();
                communicator.recv(BufferMut::from_slice(&mut value), partner).unwrap();
            } else {
                communicator.recv(BufferMut::from_slice(&mut value), partner).unwrap();
                communicator.send(Buffer::from_slice(&sent), partner).unwrap();
            }
            assert_eq!(value, [round * 10 + partner as u32]);
        }
        value[0]
    });
    assert_eq!(received, [991, 990, 993, 992]);
}

#[test]
fn the_first_cause_can_be_asked_for() {
    let communicators = ThreadCommunicator::group(ranks(2), TIMEOUT);
    assert_eq!(communicators[0].first_cause(), None);
    communicators[1].abort("why not");
    let aborted = CollectiveError::Aborted { rank: 1, world_size: 2, reason: "why not".to_owned() };
    assert_eq!(communicators[0].first_cause(), Some(aborted));
}

#[test]
fn a_whole_list_counts_as_one_all_reduce_and_nothing_else() {
    run_ranks(ranks(2), TIMEOUT, |communicator| {
        let communicator = Counting::new(communicator);
        let counts = communicator.counts();
        let (mut a, mut b) = ([1f32; 3], [1i64; 2]);
        let mut list = [BufferMut::from_slice(&mut a), BufferMut::from_slice(&mut b)];
        communicator.all_reduce_many(&mut list, ReduceOp::Sum).unwrap();
        assert_eq!(counts.tally().to_string(), "1 all_reduce (28 bytes)");

        let before = counts.tally();
        let buffers = vec![vec![0u8; 8], vec![0u8; 4]];
        communicator.all_reduce_shared(buffers, &[DType::F64, DType::F32], ReduceOp::Mean).unwrap();
        communicator.exchange("weights", 100, Arc::new(())).unwrap();
        communicator.barrier().unwrap();
        let since = counts.tally() - before;
        assert_eq!(since.to_string(), "1 all_reduce (12 bytes), 1 barrier (0 bytes), 1 exchange (100 bytes)");
        assert_eq!((since.num_calls(Collective::Broadcast), since.total_calls()), (0, 3));
    });
}
