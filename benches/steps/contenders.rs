//! Who runs against whom. Each contender has threads of its own and trains a model of its own, with Adam.

use std::{
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Instant,
};

use bonfire::{Balance, Replica, ReplicaDevice, ReplicaOptions, Shares, Spread};
use burn::{
    backend::Autodiff,
    optim::{AdamConfig, GradientsParams, Optimizer},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_flex::{Flex, FlexDevice};

use crate::{
    probe::{Probe, ProbeDevice},
    subjects::Subject,
};

pub type Plain = Autodiff<Flex>;
pub type Replicated = Autodiff<Replica<Flex>>;
pub type Probed = Autodiff<Replica<Probe>>;

/// Runs one measurement and gives its seconds.
pub type Contender = Box<dyn FnMut() -> f64>;

/// The plain backend on one thread with a pool of `num_threads`.
pub fn plain<S: Subject>(batch_size: usize, num_threads: usize, num_steps: usize) -> Contender {
    threads(1, num_threads, num_steps, move |_| trainer::<Plain, S>(FlexDevice, batch_size))
}

/// `num_threads` plain backends that know nothing of each other, each with a part of the batch and one thread.
pub fn free_threads<S: Subject>(batch_size: usize, num_threads: usize, num_steps: usize) -> Contender {
    threads(num_threads, 1, num_steps, move |_| trainer::<Plain, S>(FlexDevice, batch_size / num_threads))
}

/// A replica of `num_members` with `threads_per_member` each.
pub fn replica<S: Subject>(
    batch_size: usize,
    num_members: usize,
    threads_per_member: usize,
    num_steps: usize,
) -> Contender {
    // What the caller computes before anything is spread has the threads that plain has.
    threads(1, threads_per_member, num_steps, move |_| {
        let options = ReplicaOptions { threads_per_member: Some(threads_per_member), ..Default::default() };
        let device = ReplicaDevice::with_options(vec![FlexDevice; num_members], options).expect("members");
        trainer::<Replicated, S>(device, batch_size)
    })
}

/// Steps on two members, which share even the smallest product.
pub fn steps_on_members<S: Subject>(batch_size: usize) -> impl FnMut() {
    let options = ReplicaOptions { spread: Spread::OnHeavyOp { min_work: 1 }, ..Default::default() };
    let device = ReplicaDevice::with_options(vec![FlexDevice; 2], options).expect("members");
    trainer::<Replicated, S>(device, batch_size)
}

/// A replica of two members with a thread each, of which the second takes `factor` times as long for each operation.
pub fn slowed<S: Subject>(
    batch_size: usize,
    factor: f64,
    shares: Shares,
    balance: Balance,
    num_steps: usize,
) -> Contender {
    threads(1, 1, num_steps, move |_| {
        let devices = ProbeDevice::fresh(2);
        devices[1].slow_down(factor);
        let (shares, balance) = (shares.clone(), balance.clone());
        let options = ReplicaOptions { shares, balance, threads_per_member: Some(1), ..Default::default() };
        let device = ReplicaDevice::with_options(devices, options).expect("members");
        trainer::<Probed, S>(device, batch_size)
    })
}

/// Seconds that the caller takes to enqueue one elementwise operation, per member.
pub fn controller(num_members: usize) -> Contender {
    type B = Replica<Flex>;
    const NUM_OPS: usize = 500;
    let device = ReplicaDevice::<Flex>::new(vec![FlexDevice; num_members]).expect("members");
    let spread = Tensor::<B, 2>::ones([256, 64], &device).matmul(Tensor::ones([64, 64], &device)).narrow(1, 0, 1);
    Box::new(move || {
        let mut x = spread.clone();
        B::sync(&device).expect("members run");
        let start = Instant::now();
        for _ in 0..NUM_OPS {
            x = x.abs();
        }
        let seconds = start.elapsed().as_secs_f64();
        drop(x);
        B::sync(&device).expect("members run");
        seconds / (NUM_OPS * num_members) as f64
    })
}

/// `num_threads` threads, each with a rayon pool of its own that starts with it, run the same number of steps at once.
fn threads<F: FnMut() + 'static>(
    num_threads: usize,
    pool_threads: usize,
    num_steps: usize,
    make: impl Fn(usize) -> F + Clone + Send + 'static,
) -> Contender {
    let workers: Vec<(Sender<()>, Receiver<()>)> = (0..num_threads)
        .map(|index| {
            let (start, started) = channel();
            let (finish, finished) = channel();
            let make = make.clone();
            thread::spawn(move || {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(pool_threads).use_current_thread().build();
                let _pool = pool.expect("a pool");
                let mut step = make(index);
                for () in started {
                    (0..num_steps).for_each(|_| step());
                    finish.send(()).expect("somebody waits");
                }
            });
            (start, finished)
        })
        .collect();
    Box::new(move || {
        let begin = Instant::now();
        workers.iter().for_each(|(start, _)| start.send(()).expect("a worker"));
        workers.iter().for_each(|(_, finished)| finished.recv().expect("a worker"));
        begin.elapsed().as_secs_f64() / num_steps as f64
    })
}

/// One step: batch from the host, forward, loss, backward, Adam, and the loss read.
pub fn trainer<B: AutodiffBackend, S: Subject>(device: B::Device, batch_size: usize) -> impl FnMut() {
    let batch = S::batch(batch_size);
    let mut model = Some(S::init::<B>(&device));
    let mut optimizer = AdamConfig::new().init::<B, S::Model<B>>();
    move || {
        let current = model.take().expect("put back after each step");
        let loss = S::loss(&current, &batch, &device);
        let grads = GradientsParams::from_grads(loss.backward(), &current);
        model = Some(optimizer.step(1e-3, current, grads));
        std::hint::black_box(loss.into_data());
        B::sync(&device).expect("the device runs");
    }
}
