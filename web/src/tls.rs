//! TLS 1.3: the server's own certificate, and, if it is told to ask for them, the judgement of clients' certificates: by
//! the CA that must have signed them, and by its lists of revoked ones.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime,
};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::secret;

/// What takes TLS connections.
#[derive(Clone)]
pub(crate) struct Entrance {
    pub(crate) acceptor: TlsAcceptor,
    /// What judges clients' certificates, if they are asked for.
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

impl Entrance {
    /// Whether who showed these certificates would come in now.
    pub(crate) fn takes(&self, certificates: &[CertificateDer<'_>]) -> bool {
        let Some(clients) = &self.clients else {
            return true;
        };
        let own = certificates.split_first();
        own.is_some_and(|(own, others)| {
            let verified = clients.verify_client_cert(own, others, UnixTime::now());
            verified.is_ok()
        })
    }
}

/// Made of PEM files. `clients` are the certificates of the CA that signs those of clients, and the lists of what it has
/// revoked: whose certificate it did not sign, or has revoked, is not spoken to.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn entrance(
    certificate: &Path,
    key: &Path,
    clients: Option<(&Path, Option<&Path>)>,
) -> Result<Entrance, String> {
    let provider = Arc::new(ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| error.to_string())?;
    let clients = clients.map(|(ca, revoked)| verifier(ca, revoked, provider));
    let clients = clients.transpose()?;
    let config = match &clients {
        None => config.with_no_client_auth(),
        Some(clients) => config.with_client_cert_verifier(Arc::clone(clients)),
    };
    let about = |what: &dyn ToString| format!("{}: {}", key.display(), what.to_string());
    let private = PrivateKeyDer::from_pem_slice(&secret::read(key, true, secret::MOST)?);
    let private = private.map_err(|_| about(&"there is no private key in it, as PEM"))?;
    let mut config = config
        .with_single_cert(certificates(certificate)?, private)
        .map_err(|error| about(&format!("{error} (with {})", certificate.display())))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Entrance {
        acceptor: TlsAcceptor::from(Arc::new(config)),
        clients,
    })
}

/// Judges clients' certificates by those of their CA, and by its lists.
fn verifier(
    ca: &Path,
    revoked: Option<&Path>,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let about =
        |path: &Path, what: &dyn ToString| format!("{}: {}", path.display(), what.to_string());
    let mut roots = RootCertStore::empty();
    for certificate in certificates(ca)? {
        roots.add(certificate).map_err(|error| about(ca, &error))?;
    }
    let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    if let Some(path) = revoked {
        verifier = verifier.with_crls(lists(path)?);
    }
    verifier.build().map_err(|error| {
        let its = match error {
            VerifierBuilderError::InvalidCrl(_) => revoked.unwrap_or(ca),
            _ => ca,
        };
        about(its, &error)
    })
}

fn lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let bytes = secret::read(path, false, MOST_LISTS)?;
    let found = CertificateRevocationListDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(format!(
            "{}: there is no list of revoked certificates in it, as PEM",
            path.display()
        )),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let about = |what: &str| format!("{}: {what}", path.display());
    let bytes = secret::read(path, false, secret::MOST)?;
    let found = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(about("there is no certificate in it, as PEM")),
    }
}

/// Bytes of the lists of a CA. A certificate in a list takes some 37 bytes (RFC 5280, 5.1: a number of up to 20 bytes, a
/// time), as PEM 50: that is room for more than a million of them.
const MOST_LISTS: u64 = 64 << 20;
