//! What waits for the kernel is done for a few at a time.
//!
//! For each packet ring that is opened or closed the kernel waits until no CPU can look at what was there before
//! (`synchronize_net`). Who waits at the same time waits for the same.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Does something for each, in the calling thread and a few others, which take the next one in their order whenever they are done
/// with one. What was made, in that order; `None`: that panicked, which is a bug.
pub(crate) fn each<T, M: Send>(
    all: impl Iterator<Item = T> + Send,
    work: impl Fn(T) -> M + Sync,
) -> Vec<Option<M>> {
    let threads = all.size_hint().1.unwrap_or(AT_ONCE).min(AT_ONCE);
    let left = Mutex::new(all.enumerate());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let serve = || {
        let mut made = Vec::new();
        while let Some((at, it)) = next() {
            made.push((at, catch_unwind(AssertUnwindSafe(|| work(it))).ok()));
        }
        made
    };
    let mut made = thread::scope(|scope| {
        let begin = |_| {
            let builder = thread::Builder::new().name("vnplug-opens".into());
            builder.spawn_scoped(scope, serve).ok()
        };
        // If threads are short, fewer do it.
        let others: Vec<_> = (1..threads).map_while(begin).collect();
        let mut made = serve();
        for other in others {
            made.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        made
    });
    made.sort_unstable_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, it)| it).collect()
}

/// Things of which each waits for the kernel when it is dropped. Those that nobody takes out are dropped a few at a time.
#[derive(Debug)]
pub(crate) struct Together<T: Send>(VecDeque<T>);

impl<T: Send> Default for Together<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T: Send> Deref for Together<T> {
    type Target = VecDeque<T>;

    fn deref(&self) -> &VecDeque<T> {
        &self.0
    }
}

impl<T: Send> DerefMut for Together<T> {
    fn deref_mut(&mut self) -> &mut VecDeque<T> {
        &mut self.0
    }
}

impl<T: Send> Drop for Together<T> {
    fn drop(&mut self) {
        each(self.0.drain(..), drop);
    }
}

/// The most at a time.
pub(crate) const AT_ONCE: usize = 16;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use vnplug_testing::Deadline;

    use super::*;

    /// Who passes nobody before sixteen are there, or all are late: then a thread could not be begun.
    struct Gate(AtomicUsize, Deadline);

    impl Gate {
        fn new() -> Self {
            Self(AtomicUsize::new(0), Deadline::new("sixteen are there"))
        }

        fn pass(&self) {
            let place = self.0.fetch_add(1, Ordering::Relaxed);
            let all = (place / AT_ONCE + 1) * AT_ONCE;
            while self.0.load(Ordering::Relaxed) < all {
                self.1.check();
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn sixteen_are_at_work_at_once_and_what_they_make_is_in_order() {
        let gate = Gate::new();
        let made = each(0..3 * AT_ONCE, |it| {
            gate.pass();
            it * 2
        });
        let wanted: Vec<_> = (0..3 * AT_ONCE).map(|it| Some(it * 2)).collect();
        assert_eq!(made, wanted);
    }

    #[test]
    fn sixteen_of_those_that_nobody_takes_are_dropped_at_once() {
        struct Waits<'a>(&'a Gate);
        impl Drop for Waits<'_> {
            fn drop(&mut self) {
                self.0.pass();
            }
        }
        let (gate, left) = (Gate::new(), 2 * AT_ONCE);
        let mut all = Together::default();
        all.extend((0..left + 1).map(|_| Waits(&gate)));
        // What is taken out is the taker's.
        std::mem::forget(all.pop_front());
        drop(all);
        assert_eq!(gate.0.into_inner(), left);
    }

    #[test]
    fn one_that_panics_costs_no_other() {
        let made = each(0..40, |it| {
            assert_ne!(it, 7);
            it
        });
        let wanted: Vec<_> = (0..40).map(|it| (it != 7).then_some(it)).collect();
        assert_eq!(made, wanted);
    }

    #[test]
    fn who_ends_early_has_begun_all_that_stand_before() {
        let begun = AtomicUsize::new(0);
        let made = each(
            (0..1000).take_while(|_| begun.load(Ordering::Relaxed) < 20),
            |it| {
                begun.fetch_add(1, Ordering::Relaxed);
                it
            },
        );
        assert!((20..20 + AT_ONCE).contains(&made.len()), "{}", made.len());
        assert!(
            made.into_iter()
                .eq((0..1000).map(Some).take(begun.into_inner()))
        );
    }
}
