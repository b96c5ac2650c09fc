//! What the thread does: turn after turn, until all its queues are closed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::input::{Input, Turn};
use crate::source::wake::Sleep;

/// A thread's queues.
pub(super) struct Engine {
    inputs: Vec<Input>,
    /// Whose turn it is.
    current: usize,
    started: Instant,
}

impl Engine {
    /// Whose clock began at `started`, as those of its inputs.
    pub(super) fn new(inputs: Vec<Input>, started: Instant) -> Self {
        Self {
            inputs,
            current: 0,
            started,
        }
    }

    /// Serves until each queue was told to stop.
    pub(super) fn run(mut self, cpu: Option<usize>) {
        if let Some(cpu) = cpu {
            pin(cpu);
        }
        while catch_unwind(AssertUnwindSafe(|| self.serve())).is_err() {
            self.blame();
        }
    }

    /// A panic costs the queue that the thread was at work for: it has failed, and goes on answering. One
    /// that panics on and on is closed; the others have their turns as before.
    #[cold]
    fn blame(&mut self) {
        let Some(input) = self.inputs.get_mut(self.current) else {
            log::error!(target: "source", "a queue's thread panicked for no queue: it ends");
            self.inputs.drain(..).for_each(close);
            return;
        };
        if !input.panicked() {
            close(self.inputs.remove(self.current));
        }
    }

    fn serve(&mut self) {
        let mut now_us = self.now_us();
        let mut looked_us = now_us;
        while !self.inputs.is_empty() {
            let (mut may_rest, mut is_dry) = (true, false);
            self.current = 0;
            while let Some(input) = self.inputs.get_mut(self.current) {
                let turn = input.turn(&mut now_us);
                may_rest &= turn == Turn::Rest;
                is_dry |= turn != Turn::Busy;
                match turn {
                    Turn::Stop => close(self.inputs.remove(self.current)),
                    _ => self.current += 1,
                }
            }
            let looked = may_rest && !self.arm_senders() && {
                let looked = self.sleep(now_us);
                now_us = self.now_us();
                looked
            };
            if looked {
                looked_us = now_us;
            } else if is_dry && now_us - looked_us >= LOOK_US {
                self.look();
                looked_us = now_us;
            }
        }
    }

    /// Asks all senders for a kick; true if one of them has frames already.
    #[inline]
    fn arm_senders(&mut self) -> bool {
        for (at, input) in self.inputs.iter_mut().enumerate() {
            self.current = at;
            if input.arm_senders() {
                return true;
            }
        }
        false
    }

    /// Sleeps until there is something to do for a queue; false if that was known before, and no queue
    /// was told what its descriptors say.
    fn sleep(&mut self, now_us: u64) -> bool {
        if let [only] = &mut *self.inputs {
            self.current = 0;
            if only.sleep(now_us) {
                return true;
            }
        }
        let mut sleep = Sleep::default();
        for (at, input) in self.inputs.iter_mut().enumerate() {
            self.current = at;
            let (waker, wake) = input.doze(now_us);
            sleep.add(waker, wake);
        }
        let looks = !sleep.is_over();
        let seen = sleep.sleep();
        for (at, (input, seen)) in self.inputs.iter_mut().zip(seen).enumerate() {
            self.current = at;
            input.rouse(seen);
        }
        looks
    }

    #[cold]
    fn look(&mut self) {
        for (at, input) in self.inputs.iter_mut().enumerate() {
            self.current = at;
            input.look();
        }
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }
}

/// How often a thread that does not sleep has its queues look at their interfaces.
const LOOK_US: u64 = 10_000;

/// Closes the rings of a queue's ports. A panic there costs no other queue anything.
fn close(input: Input) {
    if catch_unwind(AssertUnwindSafe(|| input.close())).is_err() {
        log::error!(target: "source", "closing a queue panicked, which is a bug in vnplugd");
    }
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    if cpu < rustix::thread::CpuSet::MAX_CPU {
        set.set(cpu);
    }
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        log::warn!(target: "source", "cannot run on CPU {cpu}: {error}; running on any");
    }
}
