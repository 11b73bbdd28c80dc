//! Who runs against whom: threads that train, each with one thread for its tensors.

use std::{
    hint::black_box,
    num::NonZeroUsize,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bonfire::{
    collectives::{Communicator, ThreadCommunicator},
    train::{SyncOptions, TrainingStep},
};
use burn::{
    backend::Autodiff,
    optim::{AdamConfig, GradientsParams, Optimizer},
};
use burn_flex::{Flex, FlexDevice};

use crate::subjects::Subject;

type B = Autodiff<Flex>;

/// Runs one measurement and gives its seconds per step.
pub type Contender = Box<dyn FnMut() -> f64>;

/// Threads that know nothing of each other, each with its part of the batch.
pub fn free<S: Subject>(num_threads: usize, batch_size: usize, num_steps: usize) -> Contender {
    on_threads(num_threads, num_steps, move |_| {
        let batch = S::batch(batch_size / num_threads);
        let mut optimizer = AdamConfig::new().init::<B, S::Model<B>>();
        let mut model = Some(S::init::<B>(&FlexDevice));
        move || {
            let current = model.take().expect("put back after each step");
            let loss = S::loss::<B>(&current, &batch, &FlexDevice);
            let gradients = GradientsParams::from_grads(loss.backward(), &current);
            model = Some(optimizer.step(1e-3, current, gradients));
            black_box(loss.into_data());
        }
    })
}

/// The same steps as ranks of one group, threads of this process.
pub fn ranks<S: Subject>(num_ranks: usize, batch_size: usize, num_steps: usize) -> Contender {
    let world_size = NonZeroUsize::new(num_ranks).expect("a rank");
    let group = ThreadCommunicator::group(world_size, Duration::from_secs(10));
    let group = group.into_iter().map(|communicator| Arc::new(communicator) as _).collect();
    ranks_of::<S>(group, batch_size, num_steps)
}

/// The same steps as those ranks of a group that are of this process.
pub fn ranks_of<S: Subject>(own_ranks: Vec<Arc<dyn Communicator>>, batch_size: usize, num_steps: usize) -> Contender {
    on_threads(own_ranks.len(), num_steps, move |index| {
        let communicator = own_ranks[index].clone();
        let batch_size = batch_size / communicator.world_size();
        let (batch, mut optimizer) = (S::batch(batch_size), AdamConfig::new().init::<B, S::Model<B>>());
        let model = S::init::<B>(&FlexDevice);
        let options = SyncOptions::default();
        let mut step = TrainingStep::<B>::new(communicator, &model, options).expect("ranks");
        let mut model = Some(step.synchronise(model).expect("ranks"));
        move || {
            let current = model.take().expect("put back after each step");
            let loss = S::loss::<B>(&current, &batch, &FlexDevice);
            let gradients = GradientsParams::from_grads(loss.backward(), &current);
            step.micro_step(gradients, batch_size as f64).expect("gradients");
            let window = step.finish().expect("ranks").expect("items");
            let stepped = optimizer.step(1e-3, current, window.gradients);
            model = Some(step.settle(stepped).expect("ranks"));
            black_box(loss.into_data());
        }
    })
}

/// One thread that runs all of `run` as one step.
pub fn once(run: impl FnMut() + Clone + Send + 'static) -> Contender {
    on_threads(1, 1, move |_| run.clone())
}

/// Threads that each start with a rayon pool of themselves alone, make what they run, and run it at once.
fn on_threads<F: FnMut() + 'static>(
    num_threads: usize,
    num_steps: usize,
    make: impl Fn(usize) -> F + Clone + Send + 'static,
) -> Contender {
    let workers: Vec<Worker> = (0..num_threads)
        .map(|index| {
            let (start, started) = channel();
            let (finish, finished) = channel();
            let make = make.clone();
            let thread = thread::spawn(move || {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
                let _pool = pool.expect("a pool");
                let mut step = make(index);
                for () in started {
                    (0..num_steps).for_each(|_| step());
                    finish.send(()).expect("somebody waits");
                }
            });
            Worker { start: Some(start), finished, thread: Some(thread) }
        })
        .collect();
    Box::new(move || {
        let begin = Instant::now();
        workers.iter().for_each(|worker| worker.start.as_ref().expect("a worker").send(()).expect("a worker"));
        workers.iter().for_each(|worker| worker.finished.recv().expect("a worker"));
        begin.elapsed().as_secs_f64() / num_steps as f64
    })
}

/// A thread that is gone, with its communicator, when the contender is: MPI ends only then.
struct Worker {
    start: Option<Sender<()>>,
    finished: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.start.take());
        if let Some(thread) = self.thread.take() {
            // It has said why, if it panicked.
            let _ = thread.join();
        }
    }
}
