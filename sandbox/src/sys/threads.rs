//! Descriptors of threads, kept from one call to the next: to make one costs as much as five other system calls.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use super::lock;
use super::process::{Told, thread_fd, told_of};

/// Threads that were seen. A descriptor never means another thread: of one that is gone the kernel tells nothing, and
/// whoever has its number now gets a new one.
#[derive(Debug, Default)]
pub(crate) struct Threads(Mutex<HashMap<u32, Arc<OwnedFd>>>);

/// The most that are kept.
const MOST: usize = 1024;
/// They may take this part of the descriptors that this process may have: one in 16.
const SHARE: u64 = 16;

impl Threads {
    /// A thread's descriptor, and what the kernel tells of it.
    ///
    /// # Errors
    /// `ESRCH` if it is gone.
    pub(crate) fn get(&self, thread: u32) -> io::Result<(Arc<OwnedFd>, Option<Told>)> {
        let known = lock(&self.0).get(&thread).cloned();
        if let Some(fd) = known
            && let Some(told) = told_of(thread, fd.as_fd())
        {
            return Ok((fd, Some(told)));
        }
        let fd = Arc::new(thread_fd(thread)?);
        let told = told_of(thread, fd.as_fd());
        // Where the kernel tells nothing, nobody would see that a thread is gone.
        if told.is_some() {
            let mut all = lock(&self.0);
            if all.len() >= most() {
                all.clear();
            }
            all.insert(thread, Arc::clone(&fd));
        }
        Ok((fd, told))
    }
}

fn most() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let share = limit.current.unwrap_or(u64::MAX) / SHARE;
    usize::try_from(share).unwrap_or(MOST).clamp(1, MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_descriptor_until_another_has_its_number() {
        let threads = Threads::default();
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (first, told) = threads.get(own).unwrap();
        let Some(told) = told else {
            // Before Linux 6.13 nothing is kept.
            return;
        };
        assert_eq!(told.process, std::process::id());
        assert_eq!(told.users, [rustix::process::getuid().as_raw(); 3]);
        let (again, _) = threads.get(own).unwrap();
        assert!(Arc::ptr_eq(&first, &again));

        let id = || rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (number, ended) = std::thread::scope(|scope| {
            let other = scope.spawn(|| (id(), threads.get(id()).unwrap().0));
            other.join().unwrap()
        });
        // The thread is gone a moment after it was joined.
        vnplug_testing::eventually("the kernel tells nothing", || {
            told_of(number, ended.as_fd()).is_none()
        });
        // As if the number were ours now.
        lock(&threads.0).insert(own, Arc::clone(&ended));
        let (fresh, _) = threads.get(own).unwrap();
        assert!(!Arc::ptr_eq(&fresh, &ended));
    }
}
