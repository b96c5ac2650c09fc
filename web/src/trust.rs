//! The files that say who may come in. They are read at the start, and again when one of them has changed: a renewed
//! certificate, a new user, a new list of revoked certificates. Whoever may not come in any more is cut off then. While a
//! file is wrong or half written, what was read before stays in force.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use crate::connections::Table;
use crate::server::Site;
use crate::tls::{self, Entrance};
use crate::users::Users;

/// What takes TLS connections, as long as the files are as they are.
pub(crate) type Tls = Arc<RwLock<Entrance>>;

/// Where they are; those that were named.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) clients: Option<PathBuf>,
    pub(crate) revoked: Option<PathBuf>,
    pub(crate) tokens: Option<PathBuf>,
}

/// What they say.
pub(crate) struct Trust {
    pub(crate) tls: Option<Entrance>,
    pub(crate) users: Option<Users>,
}

/// By what a file is known that was changed or replaced: number, time of its last change, length.
pub(crate) type Stamp = Option<(u64, u64, i64, i64, u64)>;

impl Files {
    /// Reads them.
    ///
    /// # Errors
    /// What is wrong with one.
    pub(crate) fn read(&self) -> Result<Trust, String> {
        let tls = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => {
                let clients = self.clients.as_deref();
                let clients = clients.map(|it| (it, self.revoked.as_deref()));
                Some(tls::entrance(certificate, key, clients)?)
            }
            _ => None,
        };
        let users = self.tokens.as_deref().map(Users::read).transpose()?;
        Ok(Trust { tls, users })
    }

    fn all(&self) -> impl Iterator<Item = &Path> {
        let all = [
            &self.certificate,
            &self.key,
            &self.clients,
            &self.revoked,
            &self.tokens,
        ];
        all.into_iter().filter_map(|it| it.as_deref())
    }

    /// What they are like now, to be compared later.
    pub(crate) fn stamps(&self) -> Vec<Stamp> {
        let stamp = |path: &Path| {
            let it = std::fs::metadata(path).ok()?;
            Some((it.dev(), it.ino(), it.ctime(), it.ctime_nsec(), it.size()))
        };
        self.all().map(stamp).collect()
    }
}

/// Reads them again whenever one has changed, for as long as the server runs, and cuts the connections of those who would not come in
/// any more.
pub(crate) async fn watch(
    files: Files,
    mut seen: Vec<Stamp>,
    tls: Option<Tls>,
    (site, connections): (Arc<Site>, Arc<Table>),
) {
    if files.all().next().is_none() {
        return;
    }
    let mut said = String::new();
    loop {
        tokio::time::sleep(LOOK).await;
        let (asked, before) = (files.clone(), seen.clone());
        // A disk may be slow.
        let read = tokio::task::spawn_blocking(move || {
            let now = asked.stamps();
            (now != before).then(|| (now, asked.read()))
        });
        let Ok(Some((now, read))) = read.await else {
            continue;
        };
        match read {
            Ok(trust) => {
                (seen, said) = (now, String::new());
                // NB: nothing is awaited in this arm, as nothing is between the look at who asks and the note of it in
                // `server::guard`: all of it is one thread's, so nobody comes in between.
                if let (Some(tls), Some(new)) = (&tls, &trust.tls) {
                    *tls.write().unwrap_or_else(PoisonError::into_inner) = new.clone();
                }
                let gone = trust.users.map(|users| site.gate.replace(users));
                let gone = gone.unwrap_or_default();
                let cut = connections.cut_those(|who| {
                    let is_refused = |tls: &Entrance| {
                        let shown = who.certificates.as_ref();
                        shown.is_some_and(|shown| !tls.takes(shown))
                    };
                    let is_gone = who.user.as_ref().is_some_and(|user| gone.contains(user));
                    is_gone || trust.tls.as_ref().is_some_and(is_refused)
                });
                log::warn!(
                    "certificates and tokens have changed, and are read again; connections that are cut: {cut}"
                );
            }
            // It is tried again: what is wrong may pass without a change of the files.
            Err(error) if error == said => {}
            Err(error) => {
                log::error!("what was read before goes on: {error}");
                said = error;
            }
        }
    }
}

/// Between looks at the files.
const LOOK: Duration = Duration::from_secs(2);
